/* Frames and fields of a hostile host: every accepted one must be consistent with the bytes it came from. */
#include "frame.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void walk_fields(const uint8_t *data, size_t size, unsigned depth)
{
    static uint8_t room[FRAME_PAYLOAD_MAX];
    struct fields list = fields_of(data, size);
    struct writer out = writer_of(room, sizeof room);
    struct field field;
    bool valid = fields_valid(data, size);
    while (fields_next(&list, &field)) {
        uint64_t value;
        if (field.size > size || field.data < data || field.data + field.size > data + size)
            abort();
        if (field_number(&field, &value) && field.size != 8)
            abort();
        char *text = field_text(&field, true);
        if (text != NULL && strlen(text) != field.size)
            abort();
        free(text);
        if (depth < 3)
            walk_fields(field.data, field.size, depth + 1);
        else
            write_bytes(&out, field.tag, field.data, field.size);
    }
    if (valid != (list.at == data + size) && size != 0)
        abort();
    if (depth == 3 && valid && size <= sizeof room && (out.full || out.size != size || memcmp(room, data, size) != 0))
        abort(); /* what is written again is what was read */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t at = 0;
    while (size - at >= FRAME_HEADER) {
        struct frame frame;
        uint8_t header[FRAME_HEADER];
        if (frame_is_hello(data + at, size - at) && data[at + 8] != FRAME_HELLO)
            abort();
        if (!frame_parse_header(data + at, &frame)) {
            at++;
            continue;
        }
        frame_put_header(header, frame.size, frame.channel, frame.type);
        if (frame.size > FRAME_PAYLOAD_MAX || memcmp(header, data + at, FRAME_HEADER) != 0)
            abort();
        at += FRAME_HEADER;
        if (size - at < frame.size)
            break;
        walk_fields(data + at, frame.size, 0);
        at += frame.size;
    }
    return 0;
}
