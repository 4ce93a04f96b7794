/* The worker's side of a file operation: a process of its own with the workload's rights.
 *
 * It is joined to the agent by a socket of packets: a type (as of a frame), then bytes. DATA carries bytes only,
 * the agent knows offsets and credit. The last packet says how it went: REPLY, EOF or ERROR by the operation.
 * Much DATA lies in memory that both share instead, in parts that are used in turn: a packet of type SHARED says how
 * much is in the next part, and a CREDIT that the part is free again. */
#ifndef RINGFENCE_WORKER_H
#define RINGFENCE_WORKER_H

#include "agent.h"

#include <sys/stat.h>

#define WORKER_PACKET 65536
#define WORKER_PIECE 61440 /* of DATA: a packet with it fits */
#define WORKER_PART (2 * WORKER_PIECE)
#define WORKER_PARTS 2u
#define WORKER_SHARED 0x80 /* type of a packet: u32 size */

struct work {
    int fd;
    uint16_t operation;
    char *path, *other;         /* fields 1 and 2 as text, where the operation has such */
    uint64_t numbers[9];        /* by tag */
    unsigned given;             /* bit mask of the tags that were there */
    const uint8_t *fields;      /* all of them, for those that repeat */
    size_t size;
    uint8_t *packet;            /* WORKER_PACKET bytes to receive into */
    uint8_t *shared;            /* WORKER_PARTS times WORKER_PART bytes, or NULL */
    unsigned part, lent;        /* the next part; how many the agent has */
};

void work_packet(const struct work *work, uint8_t type, const void *data, size_t size);
/* Where DATA may be put together: *size bytes, of which work_data() then sends the first. Waits for the agent. */
uint8_t *work_space(struct work *work, size_t *size);
void work_data(struct work *work, size_t size);
void work_reply(const struct work *work, const struct writer *fields);
_Noreturn void work_fail(const struct work *work, int error, const char *what);
_Noreturn void work_done(const struct work *work, const struct writer *fields); /* REPLY, and the end */
_Noreturn void work_eof(const struct work *work);
/* The next bytes of the host; size 0 at its EOF. Ends the process if the channel is gone: see `work_undo`. */
const uint8_t *work_receive(const struct work *work, size_t *size);
extern char *work_undo; /* a file to remove if the channel ends early */

void write_stat(struct writer *out, const char *path, const struct stat *stat, const char *target, size_t target_size);

_Noreturn void files_run(struct work *work); /* 16, 17, 19 to 22 */
_Noreturn void tree_list(struct work *work);
int tree_remove(int parent, const char *name); /* 0 or -1 with errno */
int make_parents(const char *path, bool last, mode_t mode);
_Noreturn void watch_run(struct work *work);
_Noreturn void tar_in_run(struct work *work);
_Noreturn void tar_out_run(struct work *work);
_Noreturn void stats_run(struct work *work);
void secrets_prepare(void); /* still with the agent's rights */
_Noreturn void bind_run(struct work *work);

#endif
