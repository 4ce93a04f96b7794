/* The guest agent: what its modules share. One thread, one epoll loop; nothing here blocks for long. */
#ifndef RINGFENCE_AGENT_H
#define RINGFENCE_AGENT_H

#include "frame.h"

#include <sys/resource.h>
#include <sys/types.h>

#define AGENT_VERSION "ringfence-agent/1"
#define LINKS_MAX 64
#define CHANNELS_MAX 1024
#define STREAM_COUNT 3
#define HOST_WINDOW 65536u         /* credit of the host on every channel at its start */
#define UPLOAD_WINDOW 262144u      /* the same for a running worker that gets more than a little */
#define GUEST_WINDOW 262144u       /* default credit of the guest */
#define RING_DEFAULT 262144u
#define RING_MIN 4096u
#define RING_MAX 16777216u
#define BUDGET (64u << 20)         /* rings and queues of all processes, channels and workers together */
#define PROCESSES_MAX 1024         /* running at once */
#define RECORDS_MAX 512            /* ended and not removed */
#define WORKERS_MAX 24             /* file operations at once; further ones wait */
#define WATCHERS_MAX 16
#define CGROUPS_MAX 16
#define OWN_MAX 32
#define LINK_DATA_HIGH (128u << 10)   /* no more DATA is queued on a link above this */
#define LINK_PARSE_HIGH (256u << 10)  /* no more frames are read from a link above this */

struct config {
    int listen_fd, stream_in, stream_out, mux_in, mux_out, wake_fd;
    int ready_fd; /* told with one byte that the agent has taken its place, or -1 */
    const char *users, *groups; /* maps of a user namespace to be made, or NULL */
    uid_t as_uid; /* what the agent becomes in it; -1: it is that already */
    gid_t as_gid;
    uint64_t held; /* capabilities that it keeps there */
    const char *cgroup_folder; /* files 0, 1, … in it are the workload's cgroup.procs */
    const char *own[OWN_MAX]; /* UID:GID:PATH, given away before anything else */
    int own_count;
    bool leave; /* the end of the only stream is the end of the sandbox */
    int filter_fd; /* a file of struct sock_filter that the agent puts on itself, or -1 */
    const char *listen_path, *mux_path, *workdir, *home;
    uid_t uid;
    gid_t gid;
    bool root;
    uint64_t caps;
    int cgroups[CGROUPS_MAX];
    int cgroup_count;
    int oom;
    unsigned max_links;
    unsigned processes; /* of the workload, 0: not limited here */
};
extern struct config config;
bool config_parse(int argc, char **argv);

/* --- loop.c: sources, timers, time --- */
struct source {
    int fd;
    uint32_t armed; /* epoll events asked for; 0: not in the set */
    void (*ready)(struct source *source, uint32_t events);
};
struct timer {
    struct timer *next;
    uint64_t due; /* ns, monotonic; 0: not set */
    void (*expired)(struct timer *timer);
};
bool loop_start(void);
int loop_arm(struct source *source, uint32_t events); /* 0 or -1 with errno */
void loop_close(struct source *source);               /* out of the set, descriptor closed, fd = -1 */
void loop_again(void);                                /* the next turn must not wait */
void loop_turn(void);
void timer_set(struct timer *timer, uint64_t delay_ns);
void timer_clear(struct timer *timer);
uint64_t now_ns(void);
extern uint8_t scratch[FRAME_MAX]; /* for the function that runs, never across a return to the loop */

/* --- memory.c: the budget --- */
bool budget_take(size_t size);
void budget_give(size_t size);

struct ring {
    uint8_t *data;
    size_t capacity, limit;
    uint64_t start, end; /* offsets of the oldest byte kept and of the next one */
    uint64_t floor;      /* `start` before room was made for a read */
};
size_t ring_reserve(struct ring *ring, size_t want, uint64_t keep);
size_t ring_space(const struct ring *ring, uint64_t keep);
ssize_t ring_read_from(struct ring *ring, int fd, size_t size);
size_t ring_peek(const struct ring *ring, uint64_t offset, const uint8_t **at); /* contiguous bytes */
void ring_forget(struct ring *ring); /* frees the storage; start = end */

/* --- link.c, channel.c --- */
struct link;
struct channel;
struct channel_ops {
    void (*data)(struct channel *channel, const uint8_t *data, size_t size);
    void (*eof)(struct channel *channel);
    void (*pump)(struct channel *channel);   /* credit came, or the link has room again */
    void (*ended)(struct channel *channel);  /* closed by the host or lost; nothing can be sent any more */
    void (*reply)(struct channel *channel);  /* of a channel that the guest opened */
};
struct channel {
    struct channel *next;
    struct link *link;
    const struct channel_ops *ops;
    void *owner;
    uint32_t id;
    uint16_t operation;
    bool sent_close, host_eof;
    uint64_t credit[STREAM_COUNT];  /* what may still be sent */
    uint64_t granted[STREAM_COUNT]; /* sum of all CREDIT */
    uint64_t host_credit, host_offset;
    uint32_t host_window;           /* credit of the host when nothing is under way */
    uint64_t owed;                  /* consumed, credit not given back yet */
};
void channel_opened(struct link *link, const struct frame *frame);
void channel_frame(struct link *link, const struct frame *frame);
struct channel *channel_open_host(struct link *link, uint16_t operation, const uint8_t *fields, size_t size);
void channel_windows(struct channel *channel, uint64_t window);
void channel_reply(struct channel *channel, const struct writer *fields);
void channel_reply_end(struct channel *channel, const struct writer *fields); /* frees the channel */
void channel_error(struct channel *channel, int error, const char *what);     /* frees the channel */
size_t channel_room(const struct channel *channel, unsigned stream);
void channel_data(struct channel *channel, unsigned stream, uint64_t offset, const uint8_t *data, size_t size);
void channel_eof(struct channel *channel, unsigned stream, uint64_t offset);
void channel_event(struct channel *channel, uint16_t event, const struct writer *fields);
void channel_close(struct channel *channel);    /* the guest is done; the channel must not be used after */
void channel_consumed(struct channel *channel, size_t size);
void channel_widen(struct channel *channel, uint32_t window); /* from now on; no effect if it is no more */
void channel_ended(struct channel *channel);    /* frees it after telling its owner */

#define CHANNEL_BUCKETS 16
struct link {
    struct link *next, *next_dirty;
    struct source in, out; /* out.fd is in.fd on a socket */
    struct channel *buckets[CHANNEL_BUCKETS];
    unsigned channels;
    uint32_t host_top, guest_next; /* highest id of the host so far; next id of ours */
    bool stream, greeted, searching, broken, dirty, hungry;
    uint8_t *input;
    size_t input_size;
    uint8_t *output;
    size_t output_start, output_size, output_capacity;
};
extern struct link *links;
extern unsigned link_count;
bool link_listen(void);
void link_unlisten(void);
bool link_prepare(void); /* memory for the next one is there */
void link_adopt(int in, int out, bool stream);
void link_send(struct link *link, uint32_t channel, uint8_t type, const void *head, size_t head_size,
               const void *body, size_t body_size);
void link_violation(struct link *link);
size_t link_room(const struct link *link);
void links_flush(void);
void links_close_all(void);
unsigned links_channels(void);
void stream_start(void);
void stream_pause(bool pause);

/* --- identity.c --- */
bool identity_take(void); /* errno says why not */

/* --- single.c: many links over the only stream --- */
bool single_claim(void); /* errno says why not */
bool single_start(void);
void single_turn(void);
bool single_busy(void);
void single_pause(bool pause);

/* --- children.c --- */
struct child {
    struct child *next;
    pid_t pid;
    void (*ended)(struct child *child, int status, const struct rusage *usage);
};
void child_watch(struct child *child, pid_t pid);
void child_forget(struct child *child);
bool child_known(pid_t pid);
void children_reap(void);
void children_look(void); /* without waiting for a signal */
extern bool children_none; /* the last wait found no child at all */
bool signals_start(void);

/* --- copies.c --- */
bool copies_waiting(void); /* a zygote has been asked, and no report has come */
void copies_take(void);    /* whatever reports have come */

/* --- queue.c: bytes of the host on their way to a descriptor --- */
struct chunk;
struct queue {
    struct chunk *head, *tail;
    size_t bytes;
};
bool queue_add(struct queue *queue, struct channel *from, const void *data, size_t size);
bool queue_packet(struct queue *queue, struct channel *from, uint8_t type, const void *data, size_t size);
int queue_write(struct queue *queue, int fd, bool packets); /* 0 empty, 1 more to write, -1 errno */
void queue_forget(struct queue *queue, const struct channel *from);
void queue_clear(struct queue *queue);

/* --- spawn.c --- */
struct spawn {
    char **argv, **envp;
    const char *cwd;
    bool pty, stdin_open, merge, as_root;
    bool zygote; /* its stdin is a socket, on which it is asked for copies of itself */
    uint16_t rows, columns;
};
struct spawned {
    pid_t pid;
    int status, in, out, err;
};
int spawn_start(const struct spawn *spawn, struct spawned *result, const char **step);
int spawn_ask(const struct spawn *spawn, int zygote, struct spawned *result, const char **step); /* pid is not known yet */
const char *spawn_step(unsigned number);
bool become_workload(bool as_root);
void reset_signals(void);
extern int null_fd, oom_fd;
extern bool terminals_silent; /* of a new size; see spawn.c */

/* --- environment.c --- */
char **environment_build(char *const *own, size_t own_count); /* free() the array only */
bool environment_bind(char **entries, size_t count);          /* takes over array and strings */

/* --- process.c --- */
void process_start(struct channel *channel, const uint8_t *fields, size_t size);
void process_attach(struct channel *channel, const uint8_t *fields, size_t size);
void process_signal(struct channel *channel, const uint8_t *fields, size_t size);
void process_list(struct channel *channel, const uint8_t *fields, size_t size);
void process_resize(struct channel *channel, const uint8_t *fields, size_t size);
void process_remove(struct channel *channel, const uint8_t *fields, size_t size);
bool processes_reclaim(void); /* gives back memory of ended processes; false: nothing left to give */
void processes_resume(void);  /* pipes that waited for memory */

/* --- worker.c --- */
void worker_operation(struct channel *channel, const uint8_t *fields, size_t size);
void workers_turn(void);
/* In the new process. `shared`: see worker.h. */
_Noreturn void work_start(int fd, uint16_t operation, const uint8_t *fields, size_t size, uint8_t *shared);

/* --- asker.c --- */
#define ASKER_NAME_MAX 256u
struct asker { /* of a connection: what belongs to the workload, and may be anything */
    uint64_t uid, inode, pid; /* pid 0: not found */
    char comm[32], name[ASKER_NAME_MAX]; /* name: its first argument */
    size_t comm_size, name_size;
};
bool asker_find(uint16_t peer, uint16_t named, struct asker *asker); /* false: nothing is known */

/* --- net.c --- */
void net_dial(struct channel *channel, const uint8_t *fields, size_t size);
void net_listen(struct channel *channel, const uint8_t *fields, size_t size);

/* --- datagram.c --- */
#define DATAGRAM_MAX 4096u
#define RECORD_HEADER 8u /* u32 size, u32 number */
struct records { /* cut out of a stream */
    uint8_t buffer[RECORD_HEADER + DATAGRAM_MAX];
    size_t have;
    const uint8_t *left;
    size_t size;
};
void records_feed(struct records *records, const uint8_t *data, size_t size);
int records_next(struct records *records, uint32_t *number, const uint8_t **body, size_t *size);
void net_datagrams(struct channel *channel, const uint8_t *fields, size_t size);

/* --- control.c --- */
extern uint64_t epoch, agent_started;
extern uint8_t instance[16];
void control_start(void);
void control_bind(struct channel *channel, const uint8_t *fields, size_t size);
void control_quiesce(struct channel *channel, const uint8_t *fields, size_t size);
void control_shutdown(struct channel *channel, const uint8_t *fields, size_t size);
void control_wake(void);
void control_terminate(void); /* SIGTERM from outside */
void control_turn(void);
void control_bound(uint16_t operation, const uint8_t *fields, size_t size); /* a worker succeeded */
void make_non_blocking(int fd);

#endif
