/* The conditions of a selection on an inode's stat, and the check of one inode. */
#ifndef TRASHD_LOOK_H
#define TRASHD_LOOK_H

#include "bulk.h"

/* The bounds as core/selection.py packs them: all are inclusive, and INT64_MAX means unlimited. */
struct bounds {
    int64_t least_size, most_size;
    struct {
        int64_t from_ns, to_ns;
    } times[4]; /* modified, accessed, changed, born */
    int64_t uid, gid; /* -1: any */
    uint32_t kinds;   /* one bit for each file type, as in a mode */
    uint8_t asks_birth, must_be_empty;
} __attribute__((packed));

struct size {
    uint64_t length, taken;
};

enum { UNSURE = 1, CHOSEN = 2 };

/* Check one name. Returns CHOSEN or 0, or UNSURE for a mount point (which is not accessed), after an error, or if the
 * kernel does not report mount points. */
int match_name(int fd, const char *name, const struct bounds *bounds, struct size *size);
/* Returns -1 after a ValueError. */
int take_bounds(struct bounds *bounds, const char *packed, Py_ssize_t size);

#endif
