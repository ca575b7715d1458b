/* How files are opened for clients: passed through to the backing filesystem where that can be, and their handles. */
#include "core.h"

#include <sys/ioctl.h>

enum { FOPEN_KEEP_CACHE = 1 << 1, FOPEN_PASSTHROUGH = 1 << 7 };
static const unsigned long BACKING_OPEN = 0x4010E501; /* FUSE_DEV_IOC_BACKING_OPEN */

/* As file_writer. */
static uint32_t owner_to_write_as(const Seen *seen) {
    return seen->uid ? seen->uid : seen->mode & (S_IWGRP | S_IWOTH) ? NOBODY : 0;
}

/* Get the id that a file which was just opened is passed through by. Without the lock. */
Opening open_backing(const Request *request, int fd, const Seen *seen) {
    const Core *core = request->core;
    struct {
        int32_t fd;
        uint32_t flags;
        uint64_t padding;
    } map = {.fd = fd};
    Opening opening = {.owner = owner_to_write_as(seen)};
    if (!core->tables->passes || seen->dev != core->root_dev)
        return opening;
    Actor writer = {.uid = core->nobody_uid, .gid = core->nobody_gid};
    if (opening.owner != NOBODY && writer.gid) /* in no group: else as itself, for all */
        writer.uid = opening.owner;
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
