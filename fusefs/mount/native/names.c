/* What changes names: CREATE, MKDIR, UNLINK, RMDIR, RENAME. What is refused is left to Python, which forgets what the
 * directories were taken for. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>

static const int ANEW = O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, NOT_BELOW = O_DIRECT | O_TRUNC;

/* New names. */

/* Reply with what was made, when it has its own number: at once, or Python waits for it. is_steady: as seen before it
 * was opened. opened: an OpenedFile, or None. Returns as an operation. */
static int tell_made(Request *request, Node *node, const Seen *seen, bool is_steady, PyObject *opened) {
    Core *core = request->core;
    if (node->nodeid == seen->ino)
        return put_entry(request, request->answer, node, seen, is_steady);
    PyObject *told = attributes_object(seen), *known = NULL;
    if (told != NULL)
        known = PyObject_CallFunction(core->EntryParam, "KOdOO", (unsigned long long)node->nodeid, told,
                                      core->lifetime_s, Py_None, is_steady ? Py_True : Py_False);
    if (known != NULL)
        request->steps = PyObject_CallFunctionObjArgs(core->numbered, known, opened, NULL);
    Py_XDECREF(told);
    Py_XDECREF(known);
    return request->steps == NULL ? RAISED : LATER;
}

int do_create(Request *request) {
    Core *core = request->core;
    uint32_t in[4]; /* struct fuse_create_in: flags, mode, umask, open_flags */
    Place place;
    Seen seen;
    Opening opening = {0};
    int result = RAISED, fd = -1, error;
    memcpy(in, request->own, sizeof in);
    if (in[1] & S_ISGID || !make_room(core->tables, request->uid) ||
        open_place(request, request->nodeid, request->payload, &place) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (changes_begin(request, place.node, place.node) < 0)
        goto end;
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
    if (changes_end(request, place.node, place.node) < 0)
        goto end;
    if (fd < 0) {
        result = NOT_OURS; /* nothing was made: Python tries, and finds out why */
        goto end;
    }
    changed(core->tables, place.node);
    if (forget_changed(request, NULL, &place, NULL) < 0)
        goto end;
    if (error) {
        result = -error;
        goto end;
    }
    Node *node = learn(request, &place, &seen);
    bool is_steady = !is_unsteady(node); /* whoever writes now changes that */
    counted(node, false);
    if (put_handle(request, node, fd, in[0], true, &opening, request->answer + ENTRY_BYTES) == 0) {
        int id = node->backing == NULL ? 0 : node->backing->backing_id;
        PyObject *opened = PyObject_CallFunction(core->OpenedFile, "iiO", fd, id, Py_True);
        if (opened != NULL)
            result = tell_made(request, node, &seen, is_steady, opened);
        Py_XDECREF(opened);
    }
    if (result >= 0)
        result += OPEN_BYTES;
    fd = -1; /* the tables' */
    node_put(node);
end:
    if (fd >= 0) {
        fd_put(opening.backing);
        close(fd);
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
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    Node *node = NULL;
    if (changes_begin(request, place.node, place.node) < 0) {
        result = RAISED;
        goto end;
    }
    Acting acting = making_as(request, is_owner(request, place.fd->number), in[1]);
    while (acts(&acting, &error))
        error = mkdirat(place.fd->number, place.name, in[0] & 07777) < 0 ? errno : 0;
    bool is_made = !error;
    if (is_made)
        error = peek(place.fd->number, place.name, core->statx_flags, &seen);
    if (changes_end(request, place.node, place.node) < 0)
        result = RAISED;
    else if (is_made) {
        result = RAISED;
        changed(core->tables, place.node);
        if (forget_changed(request, NULL, &place, NULL) < 0)
            goto end;
        if (error) {
            result = -error;
            goto end;
        }
        node = learn(request, &place, &seen);
        counted(node, true);
        result = tell_made(request, node, &seen, !is_unsteady(node), Py_None);
    }
end:
    node_put(node);
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
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (changes_begin(request, place.node, place.node) < 0) {
        close_place(&place);
        return RAISED;
    }
    if (looking(request)(place.fd->number, place.name, core->statx_flags, &seen) == 0 && seen.dev == core->root_dev) {
        Acting acting = acting_as(request, seen.uid == request->uid && is_owner(request, place.fd->number));
        while (acts(&acting, &error))
            error = unlinkat(place.fd->number, place.name, flags) < 0 ? errno : 0;
    }
    if (changes_end(request, place.node, place.node) < 0)
        result = RAISED;
    else if (!error) {
        Source source = source_of(&seen);
        changed(core->tables, place.node);
        bool is_told = forget_changed(request, find_node(core->tables, &source), &place, NULL) == 0 &&
                       lose(request, &seen, &place) == 0;
        result = is_told ? 0 : RAISED;
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
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (open_place(request, new_parent, second, &new) < 0) {
        result = PyErr_Occurred() ? RAISED : NOT_OURS;
        goto end;
    }
    if (changes_begin(request, old.node, new.node) < 0) {
        result = RAISED;
        goto end;
    }
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
    if (changes_end(request, old.node, new.node) < 0) {
        result = RAISED;
        goto end;
    }
    if (error)
        goto end;
    result = RAISED;
    Source source = source_of(&seen), replaced = source_of(&other);
    Node *node = is_there ? find_node(core->tables, &source) : NULL;
    Node *lost = no_other ? NULL : find_node(core->tables, &replaced);
    changed(core->tables, old.node);
    if (new.node != old.node)
        changed(core->tables, new.node);
    if (forget_changed(request, node, &old, &new) < 0 || (lost != NULL && forget_changed(request, lost, &old, &new) < 0))
        goto end;
    /* Two names of one file: both are left. */
    bool is_one = is_there && !no_other && seen.dev == other.dev && source.n_handle == replaced.n_handle &&
                  !memcmp(source.handle, replaced.handle, source.n_handle);
    if (!is_one && !no_other && lose(request, &other, &new) < 0)
        goto end;
    result = !is_one && is_there && move(request, &seen, &old, &new) < 0 ? RAISED : 0;
end:
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
