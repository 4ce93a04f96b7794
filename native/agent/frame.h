/* Frames and fields of the link protocol (docs/PROTOCOL.md): encoding and checking only, no I/O. */
#ifndef RINGFENCE_FRAME_H
#define RINGFENCE_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FRAME_HEADER 12
#define FRAME_PAYLOAD_MAX 65524
#define FRAME_MAX (FRAME_HEADER + FRAME_PAYLOAD_MAX)
#define DATA_HEADER 9 /* u8 stream, u64 offset */
#define HELLO_MAGIC "RINGFENCE-LINK-1"
#define HELLO_MAGIC_SIZE 16
#define HELLO_PATTERN (FRAME_HEADER + 5 + HELLO_MAGIC_SIZE)

enum frame_type {
    FRAME_HELLO = 1, FRAME_OPEN, FRAME_REPLY, FRAME_ERROR, FRAME_DATA, FRAME_CREDIT,
    FRAME_EOF, FRAME_CLOSE, FRAME_EVENT, FRAME_PING, FRAME_PONG,
};

struct frame {
    uint32_t size;
    uint32_t channel;
    uint8_t type;
    const uint8_t *payload;
};

struct field {
    uint8_t tag;
    uint32_t size;
    const uint8_t *data;
};

struct fields {
    const uint8_t *at, *end;
};

/* Appends to a buffer of fixed size; `full` says that something did not fit. */
struct writer {
    uint8_t *data;
    size_t size, capacity;
    bool full;
};

uint16_t get_u16(const uint8_t *at);
uint32_t get_u32(const uint8_t *at);
uint64_t get_u64(const uint8_t *at);
void put_u16(uint8_t *at, uint16_t value);
void put_u32(uint8_t *at, uint32_t value);
void put_u64(uint8_t *at, uint64_t value);

/* Reads a header. False: a violation (size, type, flags, reserved or the length a type must have). */
bool frame_parse_header(const uint8_t header[FRAME_HEADER], struct frame *frame);
void frame_put_header(uint8_t header[FRAME_HEADER], uint32_t size, uint32_t channel, uint8_t type);
/* True if a HELLO with its magic begins here; `available` bytes may be read. */
bool frame_is_hello(const uint8_t *at, size_t available);

/* True if the whole list is well formed. */
bool fields_valid(const uint8_t *data, size_t size);
struct fields fields_of(const uint8_t *data, size_t size);
/* False at the end, or where a length passes the end. */
bool fields_next(struct fields *list, struct field *field);
/* False: not 8 bytes. */
bool field_number(const struct field *field, uint64_t *value);
/* A path or argument: not empty unless `empty`, no NUL. Returns a new NUL-terminated copy or NULL with errno. */
char *field_text(const struct field *field, bool empty);

struct writer writer_of(uint8_t *data, size_t capacity);
void write_raw(struct writer *out, const void *data, size_t size);
void write_number(struct writer *out, uint8_t tag, uint64_t value);
void write_bytes(struct writer *out, uint8_t tag, const void *data, size_t size);

#endif
