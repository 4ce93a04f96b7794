/* Detaching the host's root takes a grace period of the kernel (0.1 ms to several), although it is gone from the
 * mount namespace at once. One process of the launcher waits for that, so that the starts need not. */
#ifndef RINGFENCE_JANITOR_H
#define RINGFENCE_JANITOR_H

/* Starts it. Without it, whoever detaches waits. */
void janitor_start(void);

/* Its socket, or -1. Children inherit it; an exec closes it. */
int janitor_socket(void);

/* Asks it to detach the mount at the folder `root` from the caller's mount namespace; 0 or errno. */
int janitor_detach(int root);

/* Returns when that mount is no longer in the caller's mount namespace; 0 or errno (EBUSY: it still is). */
int janitor_await(int root);

#endif
