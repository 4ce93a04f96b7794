/* Answers to datagrams, as a hostile host would cut them: what comes out must not depend on the cuts. */
#include "agent.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct sum {
    uint64_t hash;
    unsigned count;
    bool failed;
};

static void take(struct sum *sum, struct records *records, const uint8_t *data, size_t size)
{
    const uint8_t *body = NULL;
    uint32_t number = 0;
    size_t length = 0;
    int found = 0;
    if (sum->failed)
        return;
    records_feed(records, data, size);
    while ((found = records_next(records, &number, &body, &length)) > 0) {
        if (length > DATAGRAM_MAX)
            abort();
        for (size_t i = 0; i < length; i++)
            sum->hash = (sum->hash ^ body[i]) * 1099511628211u;
        sum->hash = (sum->hash ^ number) * 1099511628211u + length;
        sum->count++;
    }
    sum->failed = found < 0;
    if (!sum->failed && (records->size != 0 || records->have > sizeof records->buffer))
        abort(); /* all of it was taken */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct records whole, cut;
    struct sum first = {0}, second = {0};
    if (size < 2)
        return 0;
    size_t step = 1 + data[0];
    data++, size--;
    memset(&whole, 0, sizeof whole);
    memset(&cut, 0, sizeof cut);
    take(&first, &whole, data, size);
    for (size_t at = 0; at < size; at += step)
        take(&second, &cut, data + at, size - at < step ? size - at : step);
    if (first.hash != second.hash || first.count != second.count || first.failed != second.failed)
        abort();
    return 0;
}
