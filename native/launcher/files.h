/* What the launcher reads of a child in /proc and writes of it into its folder. */
#ifndef RINGFENCE_FILES_H
#define RINGFENCE_FILES_H

#include <stdint.h>

/* Field 22 of /proc/PID/stat, 0 if unknown. Read here, while the child is busy: the node would have to wait for it. */
uint64_t birth_of(int pid);

/* Writes a status of wait(2) into the file, so that it outlives the node. */
void record_exit(const char *path, int status);

#endif
