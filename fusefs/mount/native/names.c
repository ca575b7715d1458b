/* What changes names: CREATE, MKDIR, UNLINK, RMDIR, RENAME. What is refused is left to Python, which forgets what the
 * directories were taken for. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>

static const int ANEW = O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, NOT_BELOW = O_DIRECT | O_TRUNC | O_PATH | O_TMPFILE;

/* New names. */

/* Reply with what was made, when it has its own number: at once, or Python waits for it. is_steady: as seen before it
 * was opened. fd: its handle's; 0: it has none. Returns as an operation. */
static int tell_made(Request *request, Node *node, const Seen *seen, bool is_steady, int fd) {
    renumber(request->core->tables, node);
    if (!lacks_its_number(request->core->tables, node))
        return put_entry(request, request->answer, node, seen, is_steady);
    request->made = node_take(node);
    request->made_fd = fd, request->is_steady = is_steady, request->seen = *seen;
    return LATER;
}

int do_create(Request *request) {
    Core *core = request->core;
    uint32_t in[4]; /* struct fuse_create_in: flags, mode, umask, open_flags */
    Place place;
    Seen seen;
    Opening opening = {0};
    int result = NOT_OURS, fd = -1, error;
    memcpy(in, request->own, sizeof in);
    if (in[1] & S_ISGID || !make_room(core->tables, request->uid) ||
        open_place(request, request->nodeid, request->payload, &place) < 0)
        return NOT_OURS;
    changes_begin(request, place.node, place.node);
    Acting acting = making_as(request, is_owner(request, place.fd->number), in[2]);
    while (acts(&acting, &error)) {
        fd = openat(place.fd->number, place.name, (int)(in[0] & ~NOT_BELOW) | ANEW, in[1] & 07777);
        error = fd < 0 ? errno : 0;
    }
    if (!error)
        error = look(fd, "", core->statx_flags, &seen);
    if (!error)
        error = handle_of(fd, "", AT_EMPTY_PATH, &seen);
    if (!error)
        opening = open_backing(request, fd, &seen);
    if (!error && in[0] & O_APPEND)
        write_anywhere(fd);
    if (error && fd >= 0)
        close(fd);
    changes_end(request, place.node, place.node);
    if (fd >= 0) { /* else nothing was made: Python tries, and finds out why */
        changed(core->tables, place.node);
        forget_cached(request, NULL, &place);
        result = -error;
    }
    if (fd >= 0 && !error) {
        Node *node = learn(request, &place, &seen);
        bool is_steady = !is_unsteady(node); /* whoever writes now changes that */
        counted(node, false);
        put_handle(request, node, fd, in[0], true, &opening, request->answer + ENTRY_BYTES);
        result = tell_made(request, node, &seen, is_steady, fd);
        if (result >= 0)
            result += OPEN_BYTES;
        node_put(node);
    }
    close_place(&place);
    return result;
}

int do_mkdir(Request *request) {
    Core *core = request->core;
    uint32_t in[2]; /* struct fuse_mkdir_in: mode, umask */
    Place place;
    Seen seen;
    int result = NOT_OURS, error;
    memcpy(in, request->own, sizeof in);
    if (open_place(request, request->nodeid, request->payload, &place) < 0)
        return NOT_OURS;
    changes_begin(request, place.node, place.node);
    Acting acting = making_as(request, is_owner(request, place.fd->number), in[1]);
    while (acts(&acting, &error))
        error = mkdirat(place.fd->number, place.name, in[0] & 07777) < 0 ? errno : 0;
    bool is_made = !error;
    if (is_made)
        error = peek(place.fd->number, place.name, core->statx_flags, &seen);
    changes_end(request, place.node, place.node);
    if (is_made) {
        changed(core->tables, place.node);
        forget_cached(request, NULL, &place);
        result = -error;
    }
    if (is_made && !error) {
        Node *node = learn(request, &place, &seen);
        counted(node, true);
        result = tell_made(request, node, &seen, !is_unsteady(node), 0);
        node_put(node);
    }
    close_place(&place);
    return result;
}

/* Names that go, or change. */

static int remove_name(Request *request, int flags) {
    Core *core = request->core;
    Place place;
    Seen seen;
    int result = NOT_OURS, error = EACCES;
    if (open_place(request, request->nodeid, request->payload, &place) < 0)
        return NOT_OURS;
    changes_begin(request, place.node, place.node);
    if (looking(request)(place.fd->number, place.name, core->statx_flags, &seen) == 0 && seen.dev == core->root_dev) {
        Acting acting = acting_as(request, seen.uid == request->uid && is_owner(request, place.fd->number));
        while (acts(&acting, &error))
            error = unlinkat(place.fd->number, place.name, flags) < 0 ? errno : 0;
    }
    changes_end(request, place.node, place.node);
    if (!error) {
        Source source = source_of(&seen);
        changed(core->tables, place.node);
        forget_cached(request, find_node(core->tables, &source), &place);
        lose(request, &seen, &place);
        result = 0;
    }
    close_place(&place);
    return result;
}

int do_unlink(Request *request) { return remove_name(request, 0); }
int do_rmdir(Request *request) { return remove_name(request, AT_REMOVEDIR); }

static int change_name(Request *request, uint64_t new_parent, uint32_t flags) {
    Core *core = request->core;
    Place old, new = {0};
    Seen seen = {0}, other = {0};
    int result = NOT_OURS, no_other = 0, error = EACCES;
    bool is_there = false;
    const char *second = request->payload + strlen(request->payload) + 1;
    if (flags & ~(uint32_t)RENAME_NOREPLACE || second >= request->payload + request->n_payload ||
        open_place(request, request->nodeid, request->payload, &old) < 0)
        return NOT_OURS;
    if (open_place(request, new_parent, second, &new) < 0) {
        close_place(&old);
        return NOT_OURS;
    }
    changes_begin(request, old.node, new.node);
    if (look(old.fd->number, old.name, core->statx_flags, &seen) == 0 && seen.dev == core->root_dev &&
        (old.node == new.node || !S_ISDIR(seen.mode))) {
        no_other = looking(request)(new.fd->number, new.name, core->statx_flags, &other);
        bool is_plain = !no_other && other.dev == core->root_dev && (old.node == new.node || !S_ISDIR(other.mode));
        bool is_own = seen.uid == request->uid && (no_other || other.uid == request->uid) &&
                      is_owner(request, old.fd->number) && (old.node == new.node || is_owner(request, new.fd->number));
        Acting acting = acting_as(request, is_own);
        while ((no_other == ENOENT || is_plain) && acts(&acting, &error))
            error = renameat2(old.fd->number, old.name, new.fd->number, new.name, flags) < 0 ? errno : 0;
        is_there = !error && handle_of(new.fd->number, new.name, 0, &seen) == 0; /* else somebody moved it on behind us */
    }
    changes_end(request, old.node, new.node);
    if (!error) {
        Tables *t = core->tables;
        Source source = source_of(&seen), replaced = source_of(&other);
        changed(t, old.node);
        if (new.node != old.node)
            changed(t, new.node);
        forget_cached(request, is_there ? find_node(t, &source) : NULL, &old);
        forget_cached(request, no_other ? NULL : find_node(t, &replaced), &new);
        /* Two names of one file: both are left. */
        bool is_one = is_there && !no_other && seen.dev == other.dev && source.n_handle == replaced.n_handle &&
                      !memcmp(source.handle, replaced.handle, source.n_handle);
        if (!is_one && !no_other)
            lose(request, &other, &new);
        if (!is_one && is_there)
            move(request, &seen, &old, &new);
        result = 0;
    }
    close_place(&old);
    close_place(&new);
    return result;
}

int do_rename(Request *request) {
    uint64_t new_parent;
    memcpy(&new_parent, request->own, sizeof new_parent);
    return change_name(request, new_parent, 0);
}

int do_rename2(Request *request) {
    struct {
        uint64_t new_parent;
        uint32_t flags, padding;
    } in;
    memcpy(&in, request->own, sizeof in);
    return change_name(request, in.new_parent, in.flags);
}
