/* Handles: OPEN and RELEASE of files. */
#include "core.h"

#include <stdio.h>

static const uint32_t FOR_EXECUTION = 0x20; /* __FMODE_EXEC */
static const uint32_t KERNELS_OWN = O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT | O_NOCTTY | O_PATH | O_TMPFILE;

/* Open what is held by an fd as the caller. Returns an fd, or -1. */
static int open_held(const Request *request, int held, const Seen *seen, uint32_t flags) {
    char path[32];
    int fd = -1, error;
    if (!S_ISREG(seen->mode))
        return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", held);
    Acting acting = acting_as(request, seen->uid == request->uid);
    while (acts(&acting, &error)) {
        fd = open(path, (int)(flags & ~KERNELS_OWN) | O_CLOEXEC | O_NONBLOCK);
        error = fd < 0 ? errno : 0;
    }
    return fd;
}

int do_open(Request *request) {
    Core *core = request->core;
    uint32_t flags;
    Known known;
    Seen seen;
    Opening opening = {0};
    int held, fd = -1, result = NOT_OURS;
    memcpy(&flags, request->own, sizeof flags);
    if (flags & (O_TRUNC | O_DIRECT | FOR_EXECUTION) || !make_room(core->tables, request->uid) ||
        open_known(request, request->nodeid, &known) < 0)
        return NOT_OURS;
    bool is_first = !known.node->n_open;
    calls_begin(request);
    if (reach(core, &known, &seen, &held) == 0) {
        fd = open_held(request, held < 0 ? known.fd->number : held, &seen, flags);
        if (held >= 0)
            close(held);
        if (fd >= 0 && is_first)
            opening = open_backing(request, fd, &seen);
        if (fd >= 0 && core->is_shared && opening.backing == NULL && look(fd, "", core->statx_flags, &seen)) {
            close(fd);
            fd = -1;
        }
        if (fd >= 0 && flags & O_APPEND)
            write_anywhere(fd);
    }
    calls_end(request);
    if (fd >= 0) {
        bool is_kept = !core->is_shared || (opening.backing == NULL && pages_are_right(core->tables, known.node, &seen));
        put_handle(request, known.node, fd, flags, is_kept, &opening, request->answer);
        result = OPEN_BYTES;
    }
    close_known(&known);
    return result;
}

/* With the last handle of what has no name any more, that has ended. */
int do_release(Request *request) {
    Core *core = request->core;
    Tables *t = core->tables;
    uint64_t fh;
    Seen seen;
    memcpy(&fh, request->own, sizeof fh);
    Handle *handle = handle_of_number(t, fh);
    if (handle == NULL)
        return NOT_OURS;
    Node *node = handle->node;
    if (node->n_open == 1 && node->at.parent == NULL && !is_root(core, node)) {
        Fd *fd = fd_take(handle->fd);
        calls_begin(request);
        int error = look(fd->number, "", core->statx_flags, &seen);
        calls_end(request);
        fd_put(fd);
        handle = handle_of_number(t, fh);
        if (handle == NULL)
            return 0;
        node = handle->node;
        if (!error && node->n_open == 1 && !seen.nlink)
            detach_node(t, node, &seen);
    }
    bool was_passed = handle->is_passed;
    node = close_handle(t, fh);
    if (was_passed && !node->n_open && !node->is_mapped)
        forget_cached(request, node, NULL);
    end_unused(request, node);
    node_put(node);
    return 0;
}
