/* Kernel keyrings are not namespaced by anything but the user namespace: a way to carry data between sandboxes. */
#include "verdict.h"

int main(int argc, char **argv) {
    if (IS("add_key")) call(syscall(SYS_add_key, "user", "rf-decoy", "x", 1, -2 /* process keyring */));
    if (IS("request_key")) {
        long id = syscall(SYS_request_key, "user", "rf-no-such-key", NULL, 0);
        if (id >= 0 || errno == ENOKEY) succeeded(); /* the kernel looked: the call got through */
        denied(errno);
    }
    if (IS("join")) call(syscall(SYS_keyctl, 1 /* JOIN_SESSION_KEYRING */, NULL));
    if (IS("session")) call(syscall(SYS_keyctl, 0 /* GET_KEYRING_ID */, -3, 0));
    usage();
}
