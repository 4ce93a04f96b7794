/* Kernel modules, and the ports on which the host is heard. */
#include "vminit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TRIES 2000 /* of 5 ms: devices appear a moment after their module */

void write_file(const char *path, const char *content)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_TRUNC);
    if (fd < 0)
        return;
    if (write(fd, content, strlen(content)) < 0) {
        /* what must be there is looked at by whoever needs it */
    }
    close(fd);
}

bool read_file(const char *path, char *content, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, content, size - 1);
    if (fd >= 0)
        close(fd);
    content[got < 0 ? 0 : got] = 0;
    return got >= 0;
}

static void load(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die("module", path);
    if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST && errno != ENODEV)
        die("module", path);
    close(fd);
    unlink(path); /* its memory is wanted */
}

void devices_load(void)
{
    for (unsigned i = 0; i < settings.module_count; i++)
        load(settings.modules[i]);
}

/* A virtio-serial port by the name that the host gave it. */
static int serial_open(const char *name, int flags)
{
    char path[300], found[128];
    DIR *folder = opendir("/sys/class/virtio-ports");
    const struct dirent *entry;
    int fd = -1;
    errno = ENODEV;
    while (folder != NULL && fd < 0 && (entry = readdir(folder)) != NULL) {
        snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
        if (entry->d_name[0] == '.' || !read_file(path, found, sizeof found))
            continue;
        found[strcspn(found, "\n")] = 0;
        if (strcmp(found, name) != 0)
            continue;
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        fd = open(path, flags | O_CLOEXEC);
    }
    if (folder != NULL)
        closedir(folder);
    return fd;
}

static int vsock_listen(const char *port)
{
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = (unsigned)atoi(port)};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 64) < 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* `serial:NAME`: the port itself. `vsock:PORT`: a listening socket. */
int port_open(const char *transport, int flags)
{
    const struct timespec pause = {0, 5000000};
    int fd = -1;
    for (int i = 0; i < TRIES && fd < 0; i++) {
        if (i > 0)
            nanosleep(&pause, NULL);
        if (!strncmp(transport, "serial:", 7))
            fd = serial_open(transport + 7, flags);
        else if (!strncmp(transport, "vsock:", 6))
            fd = vsock_listen(transport + 6);
        else {
            errno = EINVAL;
            break;
        }
    }
    return fd;
}
