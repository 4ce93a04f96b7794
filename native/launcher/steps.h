/* Running a plan's steps in the new child, in order, until one of them fails or is an exec. */
#ifndef RINGFENCE_STEPS_H
#define RINGFENCE_STEPS_H

#include "plan.h"

/* Shared with the launcher, one a child: how far it got. Written by the child alone (but for `go`). */
struct slot {
    volatile uint32_t step;     /* index of the step under way */
    volatile int32_t error;     /* errno of the step that failed */
    volatile uint32_t landlock; /* ABI in force, 0 if none */
    volatile uint32_t go;       /* futex: the maps are written */
    volatile uint32_t ready;    /* the next thing is the exec: only its success closes the pipe without error */
    uint32_t reserved[3];
};

struct place {
    int from, to;
};

struct run {
    const struct plan *plan;
    const int *descriptors;
    struct slot *slot;
    int alive;              /* write end of the pipe to the launcher: POLLERR when the launcher is gone */
    int userns;             /* made by USERNS, or -1 */
    const struct plan *prelude; /* for PRELUDE, unless it is done */
    int prelude_done, detaching;
    int host_root;          /* the host's / while BIND needs it, or -1 */
    int ruleset;            /* Landlock's, or -1 */
    uint32_t owner_uid, owner_gid;
    struct place places[FDS_MAX];
    unsigned place_count;
    int placed, exec_fd;
    char *argv[ARGS_MAX], *envp[ENV_MAX];
    unsigned argc, envc;
};

void run_begin(struct run *run, const struct plan *plan, const int *descriptors, struct slot *slot, int alive, int userns);

/* 0 when every step is done and none was an exec; else the errno of slot->step (its index, plus `mark`). */
int run_steps(struct run *run, unsigned mark);

/* Makes a user namespace with these maps, no nested ones allowed; a descriptor, or -errno. */
int userns_make(const struct step *maps);

/* The same, kept for the next time: every sandbox of a host uid range asks for the same maps. Not the caller's to close. */
int userns_cached(const struct step *maps);

/* Writes the maps of `pid`'s new user namespace; 0 or errno. */
int userns_write_maps(int pid, const struct step *maps, int deny_setgroups);

#endif
