/* Ending what a child has started, where that would outlive it. */
#ifndef RINGFENCE_KILLING_H
#define RINGFENCE_KILLING_H

/* SIGKILL for a child of the launcher and everything below it, though it may be forking just now. Waits at most a
   second until the child has stopped. The caller reaps it. */
void kill_tree(int pid);

#endif
