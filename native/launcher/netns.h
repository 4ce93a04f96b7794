/* Network namespaces made ahead: making one takes most of a millisecond, joining one a few microseconds. */
#ifndef RINGFENCE_NETNS_H
#define RINGFENCE_NETNS_H

enum { NETNS_MAX = 64 };

/* Starts the process that makes them and asks it for `count`; a descriptor to be watched, or -1: do without. */
int netns_start(unsigned count);

/* Called when that descriptor is readable: takes what is ready. */
void netns_receive(void);

/* One that nobody else has had or will have, or -1. */
int netns_take(void);

/* Has others made in place of those taken; called when a start is over, so as not to be in its way. */
void netns_refill(void);

#endif
