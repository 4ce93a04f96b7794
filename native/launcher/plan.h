/* A plan: what a launcher does, as data. Parsed whole and checked before anything is done. */
#ifndef RINGFENCE_PLAN_H
#define RINGFENCE_PLAN_H

#include <stddef.h>
#include <stdint.h>

enum { PLAN_MAX = 65536, STEPS_MAX = 512, FDS_MAX = 128, MAPS_MAX = 32, ARGS_MAX = 256, ENV_MAX = 1024,
       PLACES = 256 /* numbers that descriptors of a plan can be given: below this */ };

enum phase { P, C };

enum op {
#define OP(number, name, signature, phase) OP_##name = number,
#include "ops.def"
#undef OP
};

/* Set in slot->step while a step of the prelude is under way. */
enum { STEP_OF_PRELUDE = 0x10000 };

/* BIND flags */
enum {
    BIND_READONLY = 1, BIND_IDMAP = 2, BIND_DEVICES = 4, BIND_NOEXEC = 8,
    BIND_OPTIONAL = 16,  /* a missing source or target is fine */
    BIND_MAKE = 32,      /* make a missing target, with its parents */
    BIND_INSIDE = 64,    /* the source is a path inside, not on the host */
    BIND_FLAT = 128,     /* without the mounts below the source */
    BIND_MOVE = 256,     /* the mount itself and all below it, as they are; no other flag counts */
};

struct step {
    uint16_t op;
    uint64_t number[4];     /* u and f arguments, in order */
    const char *text[4];    /* s arguments, in order */
    const uint8_t *bytes;   /* the b argument */
    uint32_t length;
};

struct id_map {
    uint32_t kind;          /* 0 user, 1 group */
    uint32_t inside, outside, count;
};

struct plan {
    struct step steps[STEPS_MAX];
    unsigned count;
};

/* 0, or the errno: EPROTO (not a plan), ENOSYS (unknown step), E2BIG (too many). The plan points into `data`. */
int plan_parse(const uint8_t *data, size_t size, unsigned descriptors, struct plan *plan);

/* The i-th map of a USERNS or MAPS step. */
struct id_map plan_map(const struct step *step, unsigned i);

const char *plan_name(unsigned op);
enum phase plan_phase(unsigned op);

#endif
