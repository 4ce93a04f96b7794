/* Records of commands, shared by process.c (operations) and output.c (rings and readers). */
#ifndef RINGFENCE_PROCESS_H
#define RINGFENCE_PROCESS_H

#include "agent.h"

enum process_state { PROCESS_RUNNING, PROCESS_EXITED, PROCESS_KILLED, PROCESS_STARTING };

struct process;

struct output {
    struct source source; /* fd -1: ended */
    struct process *process;
    struct ring ring;
    bool starved; /* waits for memory, not for a reader */
};

/* One channel that follows a process. */
struct reader {
    struct reader *next;
    struct process *process;
    struct channel *channel;
    uint64_t at[2];   /* next offset to send */
    uint64_t from[2]; /* first offset sent: with the credit given since, what the host has surely taken */
    uint64_t window;
    bool ended[2];    /* EOF sent, or not wanted */
    bool told;        /* EVENT exit sent */
    bool silent;
    bool mute;        /* another one has taken the input over: what its host still sends is dropped */
};

struct process {
    struct child child;
    struct process *next;
    char *id, *name;
    enum process_state state;
    int code;
    bool pty, drop;
    bool lingering; /* EOF waits for the exit */
    struct output out[2];
    struct source in;
    struct queue queue;
    uint64_t in_taken;
    bool in_eof;
    struct source status;
    struct channel *starter; /* whose REPLY is due once the program runs */
    bool detached;
    bool zygote;       /* makes copies of itself */
    uint64_t asked_ns; /* not 0: it is to become a copy of a zygote, asked for then; no process yet while it starts */
    bool copied;
    struct reader *readers;
    uint64_t started_ns; /* since the epoch */
    uint64_t end[2], user_us, system_us, resident;
};

extern struct process *processes; /* newest first */
void process_failed(struct process *process, int error, const char *step); /* its start did; frees it */

void process_resolve(struct process *process);

int copy_from(const struct process *process);
int copy_take(struct process *process); /* reads its report: 0, an errno, or -1: none yet */
void copy_wait(struct process *process);

bool reader_add(struct process *process, struct channel *channel, const uint64_t from[2], uint64_t window, bool silent);
void readers_mute(struct process *process); /* of all that are there */
void reader_muted(const struct reader *reader); /* tells its host */
void reader_pump(struct reader *reader);
void readers_pump(struct process *process);
void readers_close(struct process *process);
void output_start(struct process *process, int out, int err, int in, size_t limit);
void output_resume(struct process *process);
void output_drain(struct process *process); /* at the exit: reads what is there, fills in `end` */
void output_close(struct process *process);
bool input_write(struct process *process);
void input_settle(struct process *process);

#endif
