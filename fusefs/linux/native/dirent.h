/* The result of getdents64; bench/bare_sweep.c includes it, too. */
#ifndef TRASHD_DIRENT_H
#define TRASHD_DIRENT_H

#include <stdbool.h>
#include <stdint.h>

enum { ROOM = 32768 }; /* for the result of one call */

struct entry { /* struct linux_dirent64 */
    uint64_t ino;
    int64_t next;
    uint16_t length;
    uint8_t kind;
    char name[];
} __attribute__((packed));

static inline bool is_dots(const char *name) { return name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2])); }

#endif
