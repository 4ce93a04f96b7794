/* The launcher's loop: plans come in on a SOCK_SEQPACKET socket, children go out, their ends are reported. */
#ifndef RINGFENCE_SERVER_H
#define RINGFENCE_SERVER_H

#include <stdint.h>

enum { MESSAGE_MAGIC = 0x314c4652 /* "RFL1" */, CHILDREN_MAX = 4096 };

/* From the node: this, then a plan; descriptors beside it. */
struct request {
    uint32_t magic, kind, id, reserved;
};
enum { REQUEST_INIT = 1 /* the launcher runs the plan itself */, REQUEST_SPAWN = 2,
       REQUEST_PRELUDE = 3 /* a plan without descriptors that later plans begin with */ };

/* To the node. STARTED carries the child's pidfd. */
struct reply {
    uint32_t kind, id;
    int32_t pid, error;     /* FAILED: errno of `step` */
    int32_t status;         /* EXITED: as wait(2) gives it */
    uint32_t index;         /* FAILED: position of the step in the plan */
    uint32_t landlock;      /* STARTED: ABI in force, 0 if none */
    uint32_t reserved;
    uint64_t birth;         /* STARTED: the child's start time as /proc/PID/stat has it, 0 if unknown */
    char step[32];
};
enum { REPLY_STARTED = 1, REPLY_FAILED = 2, REPLY_EXITED = 3 };

/* Serves until the socket is closed and every kept child has ended. 0, or errno. */
int serve(int socket);

#endif
