#include "plan.h"

#include <errno.h>
#include <string.h>

struct kind {
    const char *name, *signature;
    enum phase phase;
};

static const struct kind kinds[] = {
#define OP(number, name, signature, phase) [number] = {#name, signature, phase},
#include "ops.def"
#undef OP
};

static const struct kind *find(unsigned op)
{
    if (op >= sizeof kinds / sizeof *kinds || !kinds[op].name)
        return NULL;
    return &kinds[op];
}

const char *plan_name(unsigned op)
{
    const struct kind *kind = find(op);
    return kind ? kind->name : "?";
}

enum phase plan_phase(unsigned op)
{
    const struct kind *kind = find(op);
    return kind ? kind->phase : C;
}

struct reader {
    const uint8_t *at;
    size_t left;
};

static const uint8_t *take(struct reader *reader, size_t size)
{
    if (size > reader->left)
        return NULL;
    const uint8_t *start = reader->at;
    reader->at += size;
    reader->left -= size;
    return start;
}

static int take_number(struct reader *reader, void *number, size_t size)
{
    const uint8_t *start = take(reader, size);
    if (!start)
        return -1;
    memcpy(number, start, size);
    return 0;
}

static const uint8_t *take_bytes(struct reader *reader, uint32_t *size)
{
    if (take_number(reader, size, sizeof *size))
        return NULL;
    return take(reader, *size);
}

static int parse_step(struct reader *reader, const struct kind *kind, unsigned descriptors, struct step *step)
{
    unsigned numbers = 0, texts = 0;
    for (const char *letter = kind->signature; *letter; letter++) {
        uint32_t size = 0;
        switch (*letter) {
        case 'u':
        case 'f':
            if (numbers == 4 || take_number(reader, &step->number[numbers], 8))
                return EPROTO;
            if (*letter == 'f' && step->number[numbers] >= descriptors)
                return EPROTO;
            numbers++;
            break;
        case 's': {
            const uint8_t *text = take_bytes(reader, &size);
            /* Exactly one NUL, at the end: what is checked is what the kernel will read. */
            if (texts == 4 || !text || size == 0 || memchr(text, 0, size) != text + size - 1)
                return EPROTO;
            step->text[texts++] = (const char *)text;
            break;
        }
        case 'b':
            step->bytes = take_bytes(reader, &size);
            if (!step->bytes)
                return EPROTO;
            step->length = size;
            break;
        default:
            return EPROTO;
        }
    }
    return reader->left ? EPROTO : 0;
}

static int check_maps(const struct step *step)
{
    if (step->length % sizeof(struct id_map) || step->length / sizeof(struct id_map) > MAPS_MAX)
        return EPROTO;
    return 0;
}

struct id_map plan_map(const struct step *step, unsigned i)
{
    struct id_map map;
    memcpy(&map, step->bytes + (size_t)i * sizeof map, sizeof map);
    return map;
}

int plan_parse(const uint8_t *data, size_t size, unsigned descriptors, struct plan *plan)
{
    struct reader reader = {data, size};
    unsigned arguments = 0, variables = 0;
    plan->count = 0;
    if (size > PLAN_MAX)
        return E2BIG;
    while (reader.left) {
        uint16_t op, reserved;
        uint32_t length;
        if (plan->count == STEPS_MAX)
            return E2BIG;
        if (take_number(&reader, &op, 2) || take_number(&reader, &reserved, 2) || take_number(&reader, &length, 4))
            return EPROTO;
        const struct kind *kind = find(op);
        if (!kind)
            return ENOSYS;
        struct reader body = {take(&reader, length), length};
        if (!body.at || reserved)
            return EPROTO;
        struct step *step = &plan->steps[plan->count++];
        memset(step, 0, sizeof *step);
        step->op = op;
        int error = parse_step(&body, kind, descriptors, step);
        if (!error && (op == OP_USERNS || op == OP_MAPS))
            error = check_maps(step);
        if (error)
            return error;
        if ((op == OP_ARG && ++arguments >= ARGS_MAX) || (op == OP_ENV && ++variables >= ENV_MAX))
            return E2BIG;
    }
    return 0;
}
