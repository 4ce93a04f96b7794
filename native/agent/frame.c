/* Encoding and checking of frames and fields. Everything here may be fed by a hostile peer. */
#include "frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

uint16_t get_u16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

uint32_t get_u32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

uint64_t get_u64(const uint8_t *at) { return (uint64_t)get_u32(at) | (uint64_t)get_u32(at + 4) << 32; }

void put_u16(uint8_t *at, uint16_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

void put_u32(uint8_t *at, uint32_t value)
{
    put_u16(at, (uint16_t)value);
    put_u16(at + 2, (uint16_t)(value >> 16));
}

void put_u64(uint8_t *at, uint64_t value)
{
    put_u32(at, (uint32_t)value);
    put_u32(at + 4, (uint32_t)(value >> 32));
}

/* The sizes that a payload of each type may have. */
static bool size_fits(uint8_t type, uint32_t size)
{
    switch (type) {
    case FRAME_OPEN:
    case FRAME_EVENT: return size >= 2;
    case FRAME_ERROR: return size >= 4 && size <= 4 + 512;
    case FRAME_DATA: return size > DATA_HEADER;
    case FRAME_CREDIT: return size == 5;
    case FRAME_EOF: return size == DATA_HEADER;
    case FRAME_CLOSE: return size == 0;
    case FRAME_PING:
    case FRAME_PONG: return size <= 64;
    case FRAME_HELLO:
    case FRAME_REPLY: return true;
    default: return false;
    }
}

bool frame_parse_header(const uint8_t header[FRAME_HEADER], struct frame *frame)
{
    frame->size = get_u32(header);
    frame->channel = get_u32(header + 4);
    frame->type = header[8];
    frame->payload = NULL;
    if (frame->size > FRAME_PAYLOAD_MAX || header[9] || header[10] || header[11])
        return false;
    if (!size_fits(frame->type, frame->size))
        return false;
    bool zero = frame->type == FRAME_HELLO || frame->type == FRAME_PING || frame->type == FRAME_PONG;
    return zero == (frame->channel == 0);
}

void frame_put_header(uint8_t header[FRAME_HEADER], uint32_t size, uint32_t channel, uint8_t type)
{
    put_u32(header, size);
    put_u32(header + 4, channel);
    header[8] = type;
    header[9] = header[10] = header[11] = 0;
}

bool frame_is_hello(const uint8_t *at, size_t available)
{
    struct frame frame;
    if (available < HELLO_PATTERN || !frame_parse_header(at, &frame) || frame.type != FRAME_HELLO)
        return false;
    return frame.size >= 5 + HELLO_MAGIC_SIZE && at[12] == 1 && get_u32(at + 13) == HELLO_MAGIC_SIZE &&
           memcmp(at + 17, HELLO_MAGIC, HELLO_MAGIC_SIZE) == 0;
}

struct fields fields_of(const uint8_t *data, size_t size)
{
    static const uint8_t nothing[1];
    if (data == NULL)
        data = nothing, size = 0;
    return (struct fields){data, data + size};
}

bool fields_next(struct fields *list, struct field *field)
{
    size_t left = (size_t)(list->end - list->at);
    if (left < 5)
        return false;
    field->tag = list->at[0];
    field->size = get_u32(list->at + 1);
    if (field->size > left - 5)
        return false;
    field->data = list->at + 5;
    list->at += 5 + field->size;
    return true;
}

bool fields_valid(const uint8_t *data, size_t size)
{
    struct fields list = fields_of(data, size);
    struct field field;
    while (fields_next(&list, &field)) {
    }
    return list.at == list.end;
}

bool field_number(const struct field *field, uint64_t *value)
{
    if (field->size != 8)
        return false;
    *value = get_u64(field->data);
    return true;
}

char *field_text(const struct field *field, bool empty)
{
    if ((field->size == 0 && !empty) || memchr(field->data, 0, field->size) != NULL) {
        errno = EINVAL;
        return NULL;
    }
    char *text = malloc((size_t)field->size + 1);
    if (text == NULL) {
        errno = ENOMEM;
        return NULL;
    }
    memcpy(text, field->data, field->size);
    text[field->size] = 0;
    return text;
}

struct writer writer_of(uint8_t *data, size_t capacity) { return (struct writer){data, 0, capacity, false}; }

void write_raw(struct writer *out, const void *data, size_t size)
{
    if (out->full || size > out->capacity - out->size) {
        out->full = true;
        return;
    }
    if (size != 0)
        memcpy(out->data + out->size, data, size);
    out->size += size;
}

void write_number(struct writer *out, uint8_t tag, uint64_t value)
{
    uint8_t bytes[8];
    put_u64(bytes, value);
    write_bytes(out, tag, bytes, sizeof bytes);
}

void write_bytes(struct writer *out, uint8_t tag, const void *data, size_t size)
{
    uint8_t head[5];
    if (out->full || size > UINT32_MAX || out->capacity - out->size < sizeof head ||
        out->capacity - out->size - sizeof head < size) {
        out->full = true;
        return;
    }
    head[0] = tag;
    put_u32(head + 1, (uint32_t)size);
    write_raw(out, head, sizeof head);
    write_raw(out, data, size);
}
