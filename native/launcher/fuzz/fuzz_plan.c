/* libFuzzer harness of the plan parser: whatever it accepts must be readable to the last byte. */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct plan plan;
    static volatile uint64_t sink;
    if (plan_parse(data, size, 8, &plan))
        return 0;
    if (plan.count > STEPS_MAX)
        abort();
    for (unsigned i = 0; i < plan.count; i++) {
        const struct step *step = &plan.steps[i];
        for (unsigned t = 0; t < 4; t++)
            if (step->text[t])
                sink += strlen(step->text[t]);
        for (uint32_t b = 0; b < step->length; b++)
            sink += step->bytes[b];
        if (step->op == OP_USERNS || step->op == OP_MAPS)
            for (unsigned m = 0; m < step->length / sizeof(struct id_map); m++)
                sink += plan_map(step, m).count;
        sink += (uint64_t)plan_name(step->op)[0] + plan_phase(step->op);
    }
    return 0;
}
