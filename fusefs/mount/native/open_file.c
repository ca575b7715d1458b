/* Opens files for clients, in passthrough where possible, and makes their handles. */
#include "core.h"

#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

enum { FOPEN_KEEP_CACHE = 1 << 1, FOPEN_PASSTHROUGH = 1 << 7 };
static const unsigned long BACKING_OPEN = 0x4010E501; /* FUSE_DEV_IOC_BACKING_OPEN */
static const uint32_t FOR_EXECUTION = 0x20; /* __FMODE_EXEC */
static const uint32_t KERNELS_OWN = O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT | O_NOCTTY | O_PATH | O_TMPFILE;
static const long EXT_MAGIC = 0xEF53, FUSE_MAGIC = 0x65735546; /* linux/magic.h */
static const int FACCESSAT2 = 439; /* Linux 5.8 */

/* Check whether this thread may access the inode of an fd, as access(2) does. Returns 0 or an errno. */
int may_access(int fd, int mask) {
    return syscall(FACCESSAT2, fd, "", mask, AT_EACCESS | AT_EMPTY_PATH) < 0 ? errno : 0;
}

/* Open the file or directory of an fd as the caller, unless a lease prevents it. Called without the tables lock.
 *
 * Returns 0 or an errno. EAGAIN: a lease has to be broken. ESTALE: it is a FIFO, a socket or a device by now, and
 * opening these may block or have an effect. */
int open_as_caller(const Request *request, int held, const Stat *st, uint32_t flags, int *fd) {
    char path[32];
    int how = (int)(flags & ~KERNELS_OWN) | O_CLOEXEC | O_NONBLOCK, error;
    if (!S_ISREG(st->mode) && !S_ISDIR(st->mode))
        return ESTALE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", held);
    const NeededCapability needs[] = {override_of_mode(st), only_owner(st)};
    CallerAttempts attempts = attempt_with_needs(request, needs, 2);
    if (flags & FOR_EXECUTION) { /* an executable need not be readable */
        while (next_attempt(&attempts, &error))
            error = may_access(held, X_OK);
        if (error)
            return error;
        *fd = open(path, how);
        return *fd < 0 ? errno : 0;
    }
    while (next_attempt(&attempts, &error)) {
        *fd = open(path, how);
        error = *fd < 0 ? errno : 0;
    }
    return error;
}

/* Return the uid that a file's blocks are charged to: its owner; nobody if it is root's and others may write. */
uint32_t charged_uid(const Stat *st) { return st->uid ? st->uid : st->mode & (S_IWGRP | S_IWOTH) ? NOBODY : 0; }

/* Return the credentials that a file's content is written with, given its `charged_uid`. Their group owns no file; if
 * there is no such group, they are the thread's own.
 *
 * They are the same for all clients: reads and writes by a handle are made by the daemon, or by the kernel with the
 * credentials that the daemon had when it opened the backing file. ext2, ext3 and ext4 let root's fsuid use the blocks
 * that they reserve for root. A process in a file's group may keep its set-group-ID bit.
 * Source: ext4_has_free_clusters in fs/ext4/balloc.c, in_group_or_capable in fs/inode.c */
Identity writer_identity(const Core *core, int fd, uint32_t owner) {
    Identity writer = {.gid = core->nobody_gid};
    struct statfs found;
    if (!writer.gid)
        return writer;
    bool is_reserved = owner == NOBODY && !fstatfs(fd, &found) && found.f_type == EXT_MAGIC;
    writer.uid = owner != NOBODY || is_reserved ? owner : 0;
    return writer;
}

/* Return whether files of a filesystem may be passed through. A FUSE filesystem can report a failed write when the
 * handle that wrote is closed, and at no other close; in passthrough, the kernel discards that error. */
static bool may_pass_through(const Core *core, uint64_t dev, int fd) {
    struct statfs found;
    return dev == core->root_dev || (!fstatfs(fd, &found) && found.f_type != FUSE_MAGIC);
}

/* Get a backing id for a file that was just opened. Called without the tables lock. */
OpenedBacking open_backing(const Request *request, int fd, const Stat *st) {
    const Core *core = request->core;
    struct {
        int32_t fd;
        uint32_t flags;
        uint64_t padding;
    } map = {.fd = fd};
    OpenedBacking opening = {.owner = charged_uid(st)};
    if (!core->tables->passes_through || !may_pass_through(core, st->dev, fd))
        return opening;
    Identity writer = writer_identity(core, fd, opening.owner);
    int error = assume_identity(core, &writer), id = -1;
    if (!error) {
        id = ioctl(core->device, BACKING_OPEN, &map);
        error = id < 0 ? errno : 0;
    }
    restore_identity(core, &writer);
    opening.error = error;
    opening.backing = id > 0 ? fd_new(-1, core->device, id) : NULL;
    return opening;
}

/* Clear O_APPEND of an fd: not everything that is written by its handle is appended. An append-only file keeps it. */
void clear_append(int fd) {
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0)
        fcntl(fd, F_SETFL, flags & ~O_APPEND);
}

/* Make a handle of a node, with an fd that belongs to the tables from now on, and put struct fuse_open_out. opening:
 * from `open_backing`. is_kept: the kernel may keep the pages that it has cached. */
void put_handle(Request *request, Node *node, int fd, uint32_t flags, bool is_kept, OpenedBacking *opening, char *to) {
    open_handle(request->core->tables, node, fd, request->uid, flags, opening->backing, opening->owner);
    if (opening->error) {
        request->refused_errno = opening->error, request->refused_fd = fd;
        request->refused_node = node_take(node);
    }
    uint64_t fh = (uint64_t)fd;
    int32_t id = node->backing == NULL ? 0 : node->backing->backing_id;
    uint32_t how = id ? FOPEN_PASSTHROUGH : is_kept ? FOPEN_KEEP_CACHE : 0;
    memcpy(to, &fh, sizeof fh);
    memcpy(to + 8, &how, sizeof how);
    memcpy(to + 12, &id, sizeof id);
}
