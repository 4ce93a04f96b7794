/* What every C payload ends with: one line of JSON that says what came of the attack. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static inline const char *error_name(int number) {
    switch (number) {
    case EPERM: return "EPERM";
    case ENOENT: return "ENOENT";
    case ESRCH: return "ESRCH";
    case EIO: return "EIO";
    case EBADF: return "EBADF";
    case EAGAIN: return "EAGAIN";
    case ENOMEM: return "ENOMEM";
    case EACCES: return "EACCES";
    case EFAULT: return "EFAULT";
    case EBUSY: return "EBUSY";
    case EEXIST: return "EEXIST";
    case EXDEV: return "EXDEV";
    case ENODEV: return "ENODEV";
    case ENOTDIR: return "ENOTDIR";
    case EINVAL: return "EINVAL";
    case ENFILE: return "ENFILE";
    case EMFILE: return "EMFILE";
    case ENOTTY: return "ENOTTY";
    case EFBIG: return "EFBIG";
    case ENOSPC: return "ENOSPC";
    case EROFS: return "EROFS";
    case ENOSYS: return "ENOSYS";
    case EOPNOTSUPP: return "EOPNOTSUPP";
    case EAFNOSUPPORT: return "EAFNOSUPPORT";
    case EPROTONOSUPPORT: return "EPROTONOSUPPORT";
    case ESOCKTNOSUPPORT: return "ESOCKTNOSUPPORT";
    case ENOKEY: return "ENOKEY";
    case EDQUOT: return "EDQUOT";
    case EUSERS: return "EUSERS";
    case ENXIO: return "ENXIO";
    case E2BIG: return "E2BIG";
    default: return NULL;
    }
}

__attribute__((noreturn)) static inline void verdict(const char *outcome) {
    char line[256];
    int n = snprintf(line, sizeof line, "\n{\"outcome\": \"%s\"}\n", outcome);
    for (int at = 0; at < n;) {
        ssize_t k = write(1, line + at, (size_t)(n - at));
        if (k <= 0) break;
        at += (int)k;
    }
    _exit(0);
}

__attribute__((noreturn)) static inline void succeeded(void) { verdict("succeeded"); }

__attribute__((noreturn)) static inline void denied(int number) {
    char text[64];
    const char *name = error_name(number);
    if (number == ENOENT) verdict("invisible");
    if (name) snprintf(text, sizeof text, "denied:%s", name);
    else snprintf(text, sizeof text, "denied:%d", number);
    verdict(text);
}

/* Most attacks are one call: it worked, or it was denied. */
__attribute__((noreturn)) static inline void call(long result) {
    if (result < 0) denied(errno);
    succeeded();
}

__attribute__((noreturn)) static inline void usage(void) { verdict("error:unknown variant"); }

#define IS(name) (argc > 1 && strcmp(argv[1], name) == 0)
