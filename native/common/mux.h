/* Many links over one byte stream: what both ends share. docs/PROTOCOL.md has the format.
 *
 * No descriptor of the stream is touched here: bytes go in by mux_feed() and come out of `output`. The local sockets
 * of the links are read and written here, non-blocking, when the caller's loop says so. */
#ifndef RINGFENCE_MUX_H
#define RINGFENCE_MUX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MUX_FRAME_MAX 65536u
#define MUX_HEAD 8u
#define MUX_SEAL 4u
#define MUX_PAYLOAD_MAX (MUX_FRAME_MAX - MUX_HEAD - MUX_SEAL)
#define MUX_RECORD (MUX_HEAD + 40u + MUX_SEAL) /* a whole RESET or READY */
#define MUX_MAGIC "RINGFENCE-MUX-1\n"
#define MUX_NONCE 16u
#define MUX_WINDOW 131072u /* taken on each link before credit is given: the most that is buffered for it */
#define MUX_LINKS 64u      /* open at once */
#define MUX_NUMBERS 128u   /* numbers in use at once, half-closed ones counted in */
#define MUX_SLOTS 192u     /* those, and links whose last bytes are on their way to a slow reader */
#define MUX_OUTPUT (2u * MUX_FRAME_MAX + 4096u)
#define MUX_OUTPUT_HIGH MUX_FRAME_MAX /* no more is read from links above this */

enum mux_type { MUX_RESET = 1, MUX_READY, MUX_OPEN, MUX_DATA, MUX_CREDIT, MUX_CLOSE, MUX_LOST };

struct mux_link {
    int fd;      /* of the local socket; -1: gone */
    uint32_t id; /* 0: the number is free again, only the last bytes are on their way */
    bool used, announce, close_due, sent_close, got_close;
    bool readable; /* since the last EAGAIN */
    bool deaf;     /* the local side takes nothing more */
    uint32_t credit, room, owed; /* what may be sent; what the peer may send; what it has to be credited */
    uint8_t *data; /* MUX_WINDOW bytes, while some wait for the local side */
    uint32_t start, size;
};

struct mux {
    bool host;  /* this end opens links */
    bool open;  /* begun; else bytes are dropped until the record that begins */
    bool lost;  /* host: the guest lost its place, or sent what it must not; the caller begins anew in its time */
    bool taken; /* host: another host process has the stream */
    bool ready_due, lost_due;
    uint8_t nonce[MUX_NONCE];
    uint32_t next_id, peer_window, peer_links, turn;
    int (*open_link)(struct mux *mux, struct mux_link *link); /* guest: a local socket, or -1 */
    void (*close_link)(struct mux *mux, struct mux_link *link); /* closes link->fd */
    struct mux_link links[MUX_SLOTS];
    uint32_t input_size, output_start, output_size;
    uint8_t input[MUX_FRAME_MAX];
    uint8_t output[MUX_OUTPUT];
};

void mux_start(struct mux *mux, bool host);
void mux_feed(struct mux *mux, const uint8_t *data, size_t size);
void mux_fill(struct mux *mux); /* whatever is due, as far as there is room in `output` */
void mux_wrote(struct mux *mux, size_t size);
void mux_forget(struct mux *mux);    /* all links, what was read, and what was not written */
void mux_close_all(struct mux *mux); /* guest: every link ends as if its local side had, and it searches */
void mux_begin(struct mux *mux, const uint8_t nonce[MUX_NONCE], bool padded); /* host: a RESET */
bool mux_adopt(struct mux *mux, int fd); /* host: a link for this socket; false: no room */
bool mux_number_free(const struct mux *mux); /* else nobody can be adopted until a link has ended */
unsigned mux_live(const struct mux *mux);
bool mux_busy(const struct mux *mux); /* something waits to be written to the stream, as far as is known */
bool mux_wants_read(const struct mux *mux, const struct mux_link *link);
bool mux_wants_write(const struct mux_link *link);
void mux_readable(struct mux *mux, struct mux_link *link);
void mux_writable(struct mux *mux, struct mux_link *link);

#endif
