/* Children made ahead: cloned into their namespaces, the prelude done, waiting for the rest of a plan. Each
 * becomes one program and nothing of any program is in it before, so it only takes the time off the start. */
#ifndef RINGFENCE_EMBRYO_H
#define RINGFENCE_EMBRYO_H

#include "steps.h"

/* In the child: runs the prelude, waits on `socket` for a plan, runs it. */
_Noreturn void embryo_main(const struct plan *prelude, int socket, struct slot *slot, int alive);

/* In the launcher: hands a plan over, with its descriptors and the user namespace (or -1). 0 or errno. */
int embryo_send(int socket, const uint8_t *plan, size_t size, const int *descriptors, unsigned count, int userns);

#endif
