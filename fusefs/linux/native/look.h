/* What a selection asks of an inode, and one look at it. */
#ifndef TRASHD_LOOK_H
#define TRASHD_LOOK_H

#include "bulk.h"

/* As core/selection.py packs them; all bounds are included, and INT64_MAX is without end. */
struct bounds {
    int64_t least_size, most_size;
    struct {
        int64_t from_ns, to_ns;
    } times[4]; /* modified, read, changed, made */
    int64_t uid, gid; /* -1: whoever's */
    uint32_t kinds;   /* bits: of a mode's type */
    uint8_t asks_birth, must_be_empty;
} __attribute__((packed));

struct size {
    uint64_t length, taken;
};

enum { UNSURE = 1, CHOSEN = 2 };

/* CHOSEN, UNSURE or 0. What is mounted on a name is not looked at, and what a kernel does not say of that is unsure. */
int look(int fd, const char *name, const struct bounds *bounds, struct size *size);
/* Raises  ValueError, and is -1 */
int take_bounds(struct bounds *bounds, const char *packed, Py_ssize_t size);

#endif
