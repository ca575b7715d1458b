/* How files are opened for clients: passed through to the backing filesystem where that can be, and their handles. */
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

/* Whether this thread may access what an fd holds, as `access` says. Returns 0 or an errno. */
int may_access(int fd, int mask) {
    return syscall(FACCESSAT2, fd, "", mask, AT_EACCESS | AT_EMPTY_PATH) < 0 ? errno : 0;
}

/* Open a file or directory that is held by an fd as the caller, when no lease on it is in the way. Without the tables.
 *
 * Returns 0 or an errno: EAGAIN: a lease is; ESTALE: it is a FIFO, a socket or a device by now: to open these may wait, or
 * do something. */
int open_held(const Request *request, int held, const Seen *seen, uint32_t flags, int *fd) {
    char path[32];
    int how = (int)(flags & ~KERNELS_OWN) | O_CLOEXEC | O_NONBLOCK, error;
    if (!S_ISREG(seen->mode) && !S_ISDIR(seen->mode))
        return ESTALE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", held);
    const Need needs[] = {by_mode(seen), by_owner_alone(seen)};
    Acting acting = acting_by(request, needs, 2);
    if (flags & FOR_EXECUTION) { /* a program need not be readable */
        while (acts(&acting, &error))
            error = may_access(held, X_OK);
        if (error)
            return error;
        *fd = open(path, how);
        return *fd < 0 ? errno : 0;
    }
    while (acts(&acting, &error)) {
        *fd = open(path, how);
        error = *fd < 0 ? errno : 0;
    }
    return error;
}

/* The uid whose blocks a file takes: its owner's; nobody's if it is root's and others may write. */
uint32_t owner_to_write_as(const Seen *seen) {
    return seen->uid ? seen->uid : seen->mode & (S_IWGRP | S_IWOTH) ? NOBODY : 0;
}

/* The credentials that a file's content is written with, by its `owner_to_write_as`: in no group, else as itself, for all.
 *
 * The same for all clients: reads and writes by a handle are the daemon's, or the kernel's with the credentials of the
 * daemon when it gave it the file. ext2, 3 and 4 give the blocks that they reserve for root to writes with root's fsuid, and a
 * process in a file's group may leave its set-group-ID bit.
 * Source: ext4_has_free_clusters in fs/ext4/balloc.c, in_group_or_capable in fs/inode.c */
Actor writer_of(const Core *core, int fd, uint32_t owner) {
    Actor writer = {.gid = core->nobody_gid};
    struct statfs found;
    if (!writer.gid)
        return writer;
    bool is_reserved = owner == NOBODY && !fstatfs(fd, &found) && found.f_type == EXT_MAGIC;
    writer.uid = owner != NOBODY || is_reserved ? owner : 0;
    return writer;
}

/* Whether files of a filesystem may be passed through: a FUSE filesystem can report a failed write at the close of the handle
 * that it came by, and at no other's, and the kernel closes its own in silence. */
static bool may_pass(const Core *core, uint64_t dev, int fd) {
    struct statfs found;
    return dev == core->root_dev || (!fstatfs(fd, &found) && found.f_type != FUSE_MAGIC);
}

/* Get the id that a file which was just opened is passed through by. Without the tables. */
Opening open_backing(const Request *request, int fd, const Seen *seen) {
    const Core *core = request->core;
    struct {
        int32_t fd;
        uint32_t flags;
        uint64_t padding;
    } map = {.fd = fd};
    Opening opening = {.owner = owner_to_write_as(seen)};
    if (!core->tables->passes || !may_pass(core, seen->dev, fd))
        return opening;
    Actor writer = writer_of(core, fd, opening.owner);
    int error = act_begin(core, &writer), id = -1;
    if (!error) {
        id = ioctl(core->device, BACKING_OPEN, &map);
        error = id < 0 ? errno : 0;
    }
    act_end(core, &writer);
    opening.error = error;
    opening.backing = id > 0 ? fd_new(-1, core->device, id) : NULL;
    return opening;
}

/* An fd that was opened to append: not all that is written by its handle is. A file that may only grow keeps it. */
void write_anywhere(int fd) {
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0)
        fcntl(fd, F_SETFL, flags & ~O_APPEND);
}

/* Have a handle of a node, by an fd that is the tables' from now on, and put struct fuse_open_out. opening: by
 * `open_backing`. is_kept: the kernel may keep its pages. */
void put_handle(Request *request, Node *node, int fd, uint32_t flags, bool is_kept, Opening *opening, char *to) {
    open_handle(request->core->tables, node, fd, request->uid, flags, opening->backing, opening->owner);
    if (opening->error) {
        request->refused = opening->error, request->refused_fd = fd;
        request->refused_node = node_take(node);
    }
    uint64_t fh = (uint64_t)fd;
    int32_t id = node->backing == NULL ? 0 : node->backing->backing_id;
    uint32_t how = id ? FOPEN_PASSTHROUGH : is_kept ? FOPEN_KEEP_CACHE : 0;
    memcpy(to, &fh, sizeof fh);
    memcpy(to + 8, &how, sizeof how);
    memcpy(to + 12, &id, sizeof id);
}
