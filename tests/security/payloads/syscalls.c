/* System calls that have no business in a sandbox, with arguments that do nothing where they get through.
   A call that reaches its own code fails with EFAULT, EINVAL and the like: "reached". */
#include "verdict.h"
#include <sys/mman.h>

static void reached(long result) {
    if (result < 0 && (errno == EPERM || errno == ENOSYS || errno == EACCES)) denied(errno);
    verdict("reached");
}

int main(int argc, char **argv) {
    char buffer[256] = {0};
    if (IS("io_uring_setup")) reached(syscall(425, 1, NULL));
    if (IS("io_uring_enter")) reached(syscall(426, -1, 0, 0, 0, NULL, 0));
    if (IS("io_uring_register")) reached(syscall(427, -1, 0, NULL, 0));
    if (IS("bpf")) reached(syscall(SYS_bpf, 0, NULL, 0));
    if (IS("perf_event_open")) reached(syscall(SYS_perf_event_open, NULL, 0, -1, -1, 0));
    if (IS("userfaultfd")) reached(syscall(SYS_userfaultfd, 1));
    if (IS("init_module")) reached(syscall(SYS_init_module, NULL, 0, ""));
    if (IS("finit_module")) reached(syscall(SYS_finit_module, -1, "", 0));
    if (IS("delete_module")) reached(syscall(SYS_delete_module, "rf_no_such_module", 0));
    if (IS("kexec_load")) reached(syscall(SYS_kexec_load, 0, 17, NULL, 0xdead));
    if (IS("kexec_file_load")) reached(syscall(SYS_kexec_file_load, -1, -1, 0, NULL, 0xdead));
    if (IS("reboot")) reached(syscall(SYS_reboot, 0, 0, 0, NULL)); /* wrong magic: EINVAL */
    if (IS("swapon")) reached(syscall(SYS_swapon, "/tmp/rf-no-such-swap", 0));
    if (IS("swapoff")) reached(syscall(SYS_swapoff, "/tmp/rf-no-such-swap"));
    if (IS("acct")) reached(syscall(SYS_acct, "/tmp/rf-no-such-file"));
    if (IS("syslog")) reached(syscall(SYS_syslog, 10 /* size of the buffer */, NULL, 0));
    if (IS("open_by_handle_at")) reached(syscall(SYS_open_by_handle_at, AT_FDCWD, NULL, O_RDONLY));
    if (IS("name_to_handle_at")) reached(syscall(SYS_name_to_handle_at, AT_FDCWD, "/", NULL, NULL, 0));
    if (IS("quotactl")) reached(syscall(SYS_quotactl, 0x80000100, "/tmp/rf-no-such-device", 0, NULL));
    if (IS("iopl")) reached(syscall(SYS_iopl, 3));
    if (IS("ioperm")) reached(syscall(SYS_ioperm, 0x80, 1, 1));
    if (IS("fanotify_init")) reached(syscall(SYS_fanotify_init, 0, 0));
    if (IS("lookup_dcookie")) reached(syscall(SYS_lookup_dcookie, 0, buffer, sizeof buffer));
    if (IS("settimeofday")) {
        long bad[2] = {0, -1};
        reached(syscall(SYS_settimeofday, bad, NULL));
    }
    if (IS("personality")) reached(syscall(SYS_personality, 0x0400000 /* READ_IMPLIES_EXEC */));
    if (IS("process_madvise")) reached(syscall(440, -1, NULL, 0, 0, 0));
    if (IS("memfd_secret")) reached(syscall(447, 0));
    if (IS("lsm_set_self_attr")) reached(syscall(460, 0, NULL, 0, 0));
    if (IS("modify_ldt")) reached(syscall(SYS_modify_ldt, 0, buffer, sizeof buffer));
    if (IS("mbind")) reached(syscall(SYS_mbind, NULL, 0, 0, NULL, 0, 0));
    if (IS("nfsservctl")) reached(syscall(SYS_nfsservctl, 0, NULL, NULL));
    usage();
}
