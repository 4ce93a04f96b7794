/* A guest agent that the workload owns altogether: it listens where the real one would, and lies.
   The lie is named by EVIL in its environment. It must cost the host one link, and nothing else. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HELLO = 1, OPEN, REPLY, ERROR, DATA, CREDIT, END, CLOSE, EVENT, PING, PONG };
static int link_fd;
static const char *evil;

static int is(const char *name) { return strcmp(evil, name) == 0; }

static void put(const void *data, size_t size) {
    const char *at = data;
    while (size > 0) {
        ssize_t n = write(link_fd, at, size);
        if (n <= 0) _exit(0);
        at += n;
        size -= (size_t)n;
    }
}

static void get(void *data, size_t size) {
    char *at = data;
    while (size > 0) {
        ssize_t n = read(link_fd, at, size);
        if (n <= 0) _exit(0);
        at += n;
        size -= (size_t)n;
    }
}

static void frame(uint32_t channel, uint8_t type, const void *payload, uint32_t size) {
    uint8_t head[12] = {0};
    memcpy(head, &size, 4);
    memcpy(head + 4, &channel, 4);
    head[8] = type;
    put(head, sizeof head);
    put(payload, size);
}

static size_t field(uint8_t *at, uint8_t tag, const void *data, uint32_t size) {
    at[0] = tag;
    memcpy(at + 1, &size, 4);
    memcpy(at + 5, data, size);
    return 5 + size;
}

static size_t number(uint8_t *at, uint8_t tag, uint64_t value) { return field(at, tag, &value, 8); }

static void hello(const uint8_t *theirs, uint32_t size) {
    uint8_t out[512], nonce[16] = {0}, instance[16] = {7};
    for (uint32_t at = 0; at + 5 <= size;) {
        uint32_t length;
        memcpy(&length, theirs + at + 1, 4);
        if (theirs[at] == 3 && length == 16) memcpy(nonce, theirs + at + 5, 16);
        at += 5 + length;
    }
    if (is("wrong-nonce")) nonce[0] ^= 1;
    size_t n = field(out, 1, is("wrong-magic") ? "RINGFENCE-LINK-9" : "RINGFENCE-LINK-1", 16);
    n += number(out + n, 2, 1);
    n += field(out + n, 3, nonce, 16);
    n += number(out + n, 5, 1);
    n += field(out + n, 6, instance, 16);
    n += field(out + n, 7, is("escapes") ? "\x1b[2J\x1b]0;owned\x07" : "evil", is("escapes") ? 16 : 4);
    n += number(out + n, 8, is("absurd-limits") ? UINT64_MAX : 1024);
    frame(0, HELLO, out, (uint32_t)n);
}

static void data(uint32_t channel, uint8_t stream, uint64_t offset, uint32_t size) {
    static uint8_t payload[65536];
    payload[0] = stream;
    memcpy(payload + 1, &offset, 8);
    memset(payload + 9, 'x', size);
    frame(channel, DATA, payload, size + 9);
}

static void reply(uint32_t channel) {
    uint8_t out[64];
    frame(channel, REPLY, out, (uint32_t)number(out, 1, 42));
}

static void descriptor(void) {
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    int fd = 0;
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    for (int i = 0; i < 100; i++) sendmsg(link_fd, &message, MSG_NOSIGNAL);
}

/* After the first OPEN: answer with a lie. */
static void lie(uint32_t channel) {
    static uint8_t junk[65536];
    uint8_t out[128];
    size_t n = 0;
    if (is("over-credit")) {
        reply(channel);
        for (uint64_t at = 0;; at += 60000) data(channel, 1, at, 60000);
    }
    if (is("offset-lie")) {
        reply(channel);
        data(channel, 1, UINT64_MAX - 5, 100);
    }
    if (is("offset-back")) {
        reply(channel);
        data(channel, 1, 0, 100);
        data(channel, 1, 50, 100);
    }
    if (is("wrong-stream")) {
        reply(channel);
        data(channel, 200, 0, 100);
    }
    if (is("zero-data")) {
        reply(channel);
        for (;;) data(channel, 1, 0, 0);
    }
    if (is("wrong-channel")) data(999, 1, 0, 10);
    if (is("even-open")) {
        uint16_t operation = 1;
        for (uint32_t id = 2;; id += 2) frame(id, OPEN, &operation, 2);
    }
    if (is("host-channel")) frame(channel + 2, REPLY, "", 0);
    if (is("reply-twice")) {
        reply(channel);
        for (;;) reply(channel);
    }
    if (is("events")) {
        reply(channel);
        uint16_t event = 77;
        for (;;) frame(channel, EVENT, &event, 2);
    }
    if (is("exit-lie")) { /* says it wrote an exabyte and ended well */
        uint16_t event = 1;
        reply(channel);
        memcpy(out, &event, 2);
        n = 2;
        n += number(out + n, 1, 0);
        n += number(out + n, 3, 1ull << 60);
        n += number(out + n, 4, 0);
        frame(channel, EVENT, out, (uint32_t)n);
        frame(channel, CLOSE, "", 0);
    }
    if (is("exit-code")) {
        uint16_t event = 1;
        reply(channel);
        memcpy(out, &event, 2);
        n = 2 + number(out + 2, 1, 1 << 20);
        frame(channel, EVENT, out, (uint32_t)n);
    }
    if (is("credit-flood")) {
        reply(channel);
        uint8_t credit[5] = {0, 0xff, 0xff, 0xff, 0xff};
        for (;;) frame(channel, CREDIT, credit, 5);
    }
    if (is("error-text")) { /* longer than allowed, with escapes */
        uint32_t code = 5;
        memcpy(junk, &code, 4);
        memset(junk + 4, 0x1b, 60000);
        frame(channel, ERROR, junk, 60004);
    }
    if (is("field-length")) {
        uint8_t bad[9] = {1, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0};
        frame(channel, REPLY, bad, sizeof bad);
    }
    if (is("close-early")) frame(channel, CLOSE, "", 0);
    if (is("never")) for (;;) pause();
    if (is("cut")) {
        uint8_t half[20] = {60, 0, 0, 0};
        put(half, sizeof half);
        _exit(0);
    }
    if (is("descriptors")) descriptor();
    for (;;) pause();
}

static void serve(void) {
    uint8_t head[12];
    static uint8_t payload[65536];
    if (is("silent")) for (;;) pause();
    if (is("hang-up")) _exit(0);
    if (is("garbage")) {
        for (unsigned i = 0; i < sizeof payload; i++) payload[i] = (uint8_t)(i * 2654435761u >> 13);
        for (;;) put(payload, sizeof payload);
    }
    if (is("zeros")) for (;;) put(payload, sizeof payload);
    if (is("huge-size")) {
        memset(head, 0xff, sizeof head);
        put(head, sizeof head);
        for (;;) put(payload, sizeof payload);
    }
    if (is("drip")) for (;; usleep(100000)) put("\x40", 1);
    for (;;) {
        uint32_t size, channel;
        get(head, sizeof head);
        memcpy(&size, head, 4);
        memcpy(&channel, head + 4, 4);
        if (size > sizeof payload) _exit(0);
        get(payload, size);
        if (head[8] == HELLO) {
            hello(payload, size);
            if (is("hello-again")) for (;;) hello(payload, size);
            if (is("ping-flood")) for (;;) frame(0, PING, payload, 64);
            if (is("big-ping")) frame(0, PING, payload, 60000);
            if (is("pong-first")) frame(0, PONG, payload, 8);
            if (is("flags")) {
                uint8_t wrong[12] = {0, 0, 0, 0, 0, 0, 0, 0, PING, 1, 1, 1};
                put(wrong, sizeof wrong);
            }
            if (is("unknown-type")) frame(0, 99, payload, 10);
        } else if (head[8] == OPEN) {
            lie(channel);
        } else if (head[8] == PING) {
            frame(0, PONG, payload, size);
        }
    }
}

int main(int argc, char **argv) {
    int listener = 3;
    evil = getenv("EVIL") ? getenv("EVIL") : "silent";
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], "listen=", 7) == 0) listener = atoi(argv[i] + 7);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        link_fd = accept(listener, NULL, NULL);
        if (link_fd < 0) {
            pause();
            continue;
        }
        if (fork() == 0) {
            serve();
            _exit(0);
        }
        close(link_fd);
    }
}
