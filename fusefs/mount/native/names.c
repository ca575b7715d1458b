/* What changes names: CREATE, MKDIR, UNLINK, RMDIR, RENAME. Each is done by the caller alone where all that it needs
 * is the caller's own; what is refused so is left to Python, which asks for the caller's groups and capabilities. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>

static const int ANEW = O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, NOT_BELOW = O_DIRECT | O_TRUNC;

static Actor actor_of(const Request *request) {
    return (Actor){.uid = request->uid, .gid = request->gid, .umask = request->umask};
}

static bool is_owner(const Request *request, int fd) {
    uint32_t uid;
    return !request->core->acts_as_others || (owner_of(fd, &uid) == 0 && uid == request->uid);
}

/* New names. */

/* Tell of what was made, when it has its own number: at once, or Python waits for it. opened: bytes of its handle's
 * answer behind it, or 0. Returns as an operation. */
static int tell_made(Request *request, PyObject *node, PyObject *source, const Seen *seen, PyObject *opened_file) {
    Core *core = request->core;
    uint64_t nodeid;
    int steady = is_steady(core, source);
    if (steady < 0 || number_of(node, names.nodeid, &nodeid) < 0)
        return RAISED;
    if (nodeid == seen->ino)
        return put_entry(request, request->answer, node, seen, steady);
    PyObject *told = attributes_of(core, seen), *known = NULL;
    if (told != NULL)
        known = PyObject_CallFunction(core->EntryParam, "KOdOO", (unsigned long long)nodeid, told, core->lifetime_s,
                                      Py_None, steady ? Py_True : Py_False);
    if (known != NULL)
        request->steps =
            PyObject_CallFunctionObjArgs(core->numbered, known, opened_file ? opened_file : Py_None, NULL);
    Py_XDECREF(told);
    Py_XDECREF(known);
    return request->steps == NULL ? RAISED : LATER;
}

int do_create(Request *request) {
    Core *core = request->core;
    uint32_t in[4]; /* struct fuse_create_in: flags, mode, umask, open_flags */
    Place place;
    Seen seen;
    int result = NOT_OURS, fd = -1, error = EACCES;
    memcpy(in, request->own, sizeof in);
    if (in[1] & S_ISGID || !is_known(request) || make_room(request) < 0 ||
        open_place(request, request->nodeid, request->payload, &place) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    Actor actor = actor_of(request);
    actor.makes = true, actor.umask = in[2];
    PyObject *source = NULL, *node = NULL, *handle = NULL, *opened = NULL;
    Opening opening;
    if (prepare_opening(request, NULL, in[0], &opening) < 0 || calls_begin(request) < 0) {
        result = RAISED;
        goto end;
    }
    if (is_owner(request, place.fd)) {
        error = act_begin(core, &actor);
        if (!error) {
            fd = openat(place.fd, place.text, (int)(in[0] & ~NOT_BELOW) | ANEW, in[1] & 07777);
            error = fd < 0 ? errno : 0;
        }
        act_end(core, &actor);
        if (!error)
            error = look(fd, "", core->statx_flags, &seen);
        if (!error)
            error = handle_of(fd, "", AT_EMPTY_PATH, &seen);
        if (!error)
            open_backing(request, fd, &seen, &opening);
        if (!error && opening.id && in[0] & O_APPEND)
            write_anywhere(fd);
    }
    if (calls_end(request) < 0) {
        result = RAISED;
        goto end;
    }
    if (fd < 0)
        goto end; /* nothing was made: Python tries, and tells why */
    result = RAISED;
    if (forget_changed(request, NULL, &place, NULL) < 0 || changed(core, place.node) < 0)
        goto end;
    if (error) {
        result = -error;
        goto end;
    }
    source = source_of(&seen);
    node = source == NULL ? NULL : learn(request, &place, &seen, source);
    if (node == NULL || counted(node, false) < 0)
        goto end;
    handle = put_handle(request, node, source, fd, in[0], &seen, true, &opening, request->answer + ENTRY_BYTES);
    fd = -1; /* the tables have it, or it is closed */
    opened = handle == NULL ? NULL : PyObject_CallFunction(core->OpenedFile, "OiO", handle, opening.id, Py_True);
    if (opened == NULL)
        goto end;
    result = tell_made(request, node, source, &seen, opened);
    if (result >= 0)
        result += OPEN_BYTES;
end:
    if (fd >= 0)
        leave_opening(request, fd, &opening);
    Py_XDECREF(source);
    Py_XDECREF(node);
    Py_XDECREF(handle);
    Py_XDECREF(opened);
    close_place(&place);
    return result;
}

int do_mkdir(Request *request) {
    Core *core = request->core;
    uint32_t in[2]; /* struct fuse_mkdir_in: mode, umask */
    Place place;
    Seen seen;
    int result = NOT_OURS, error = EACCES;
    bool is_made = false;
    memcpy(in, request->own, sizeof in);
    if (!is_known(request) || open_place(request, request->nodeid, request->payload, &place) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    Actor actor = actor_of(request);
    actor.makes = true, actor.umask = in[1];
    PyObject *source = NULL, *node = NULL;
    if (calls_begin(request) < 0) {
        result = RAISED;
        goto end;
    }
    if (is_owner(request, place.fd)) {
        error = act_begin(core, &actor);
        if (!error)
            error = mkdirat(place.fd, place.text, in[0] & 07777) < 0 ? errno : 0;
        act_end(core, &actor);
        is_made = !error;
        if (is_made)
            error = peek(place.fd, place.text, core->statx_flags, &seen);
    }
    if (calls_end(request) < 0)
        result = RAISED;
    else if (is_made) {
        result = RAISED;
        if (forget_changed(request, NULL, &place, NULL) < 0 || changed(core, place.node) < 0)
            goto end;
        if (error) {
            result = -error;
            goto end;
        }
        source = source_of(&seen);
        node = source == NULL ? NULL : learn(request, &place, &seen, source);
        if (node != NULL && counted(node, true) == 0)
            result = tell_made(request, node, source, &seen, NULL);
    }
end:
    Py_XDECREF(source);
    Py_XDECREF(node);
    close_place(&place);
    return result;
}

/* Names that go, or change. */

/* Call something of Python's for what it does. Returns 0, or -1 with an exception. */
static int done(PyObject *nothing) {
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* An incarnation lost a name. */
static int lose(Core *core, PyObject *source, const Seen *seen, const Place *place) {
    PyObject *told = attributes_of(core, seen);
    if (told == NULL)
        return -1;
    int error = done(PyObject_CallFunctionObjArgs(core->lost, source, told, place->node, place->name, NULL));
    Py_DECREF(told);
    return error;
}

static int remove_name(Request *request, int flags) {
    Core *core = request->core;
    Place place;
    Seen seen;
    Actor actor = actor_of(request);
    int result = NOT_OURS;
    bool is_removed = false;
    if (!is_known(request) || open_place(request, request->nodeid, request->payload, &place) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (calls_begin(request) < 0) {
        close_place(&place);
        return RAISED;
    }
    if (peek(place.fd, place.text, core->statx_flags, &seen) == 0 && seen.dev == core->root_dev &&
        (!core->acts_as_others || seen.uid == request->uid) && is_owner(request, place.fd)) {
        is_removed = act_begin(core, &actor) == 0 && unlinkat(place.fd, place.text, flags) == 0;
        act_end(core, &actor);
    }
    PyObject *source = NULL;
    if (calls_end(request) < 0)
        result = RAISED;
    else if (is_removed) {
        source = source_of(&seen);
        bool is_told = source != NULL && forget_changed(request, source, &place, NULL) == 0 &&
                       changed(core, place.node) == 0 && lose(core, source, &seen, &place) == 0;
        result = is_told ? 0 : RAISED;
    }
    Py_XDECREF(source);
    close_place(&place);
    return result;
}

int do_unlink(Request *request) { return remove_name(request, 0); }
int do_rmdir(Request *request) { return remove_name(request, AT_REMOVEDIR); }

/* An incarnation has another name. */
static int move(Core *core, PyObject *source, const Place *old, const Place *new) {
    PyObject *from = PyTuple_Pack(2, old->node, old->name), *to = PyTuple_Pack(2, new->node, new->name);
    int error = from == NULL || to == NULL
                    ? -1
                    : done(PyObject_CallFunctionObjArgs(core->moved, source, from, to, NULL));
    Py_XDECREF(from);
    Py_XDECREF(to);
    return error;
}

static int change_name(Request *request, uint64_t new_parent, uint32_t flags) {
    Core *core = request->core;
    Place old, new = {0};
    Seen seen, other;
    Actor actor = actor_of(request);
    int result = NOT_OURS, no_other = 0;
    bool is_renamed = false;
    const char *second = request->payload + strlen(request->payload) + 1;
    if (flags & ~(uint32_t)RENAME_NOREPLACE || !is_known(request) || second >= request->payload + request->n_payload ||
        open_place(request, request->nodeid, request->payload, &old) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    PyObject *source = NULL, *replaced = NULL;
    if (open_place(request, new_parent, second, &new) < 0) {
        result = PyErr_Occurred() ? RAISED : NOT_OURS;
        goto end;
    }
    if (calls_begin(request) < 0) {
        result = RAISED;
        goto end;
    }
    if (peek(old.fd, old.text, core->statx_flags, &seen) == 0 && seen.dev == core->root_dev &&
        (old.node == new.node || !S_ISDIR(seen.mode))) {
        no_other = peek(new.fd, new.text, core->statx_flags, &other);
        bool is_own = !core->acts_as_others ||
                      (seen.uid == request->uid && (no_other == ENOENT || (!no_other && other.uid == request->uid)));
        bool is_plain = !no_other && other.dev == core->root_dev && (old.node == new.node || !S_ISDIR(other.mode));
        if (is_own && (no_other == ENOENT || is_plain) && is_owner(request, old.fd) &&
            (old.node == new.node || is_owner(request, new.fd))) {
            is_renamed = act_begin(core, &actor) == 0 && renameat2(old.fd, old.text, new.fd, new.text, flags) == 0;
            act_end(core, &actor);
        }
    }
    if (calls_end(request) < 0) {
        result = RAISED;
        goto end;
    }
    if (!is_renamed)
        goto end;
    result = RAISED;
    source = source_of(&seen);
    replaced = no_other ? NULL : source_of(&other);
    if (source == NULL || (!no_other && replaced == NULL) || forget_changed(request, source, &old, &new) < 0 ||
        (replaced != NULL && forget_changed(request, replaced, &old, &new) < 0) || changed(core, old.node) < 0 ||
        (new.node != old.node && changed(core, new.node) < 0))
        goto end;
    if (replaced != NULL) {
        int is_one = PyObject_RichCompareBool(source, replaced, Py_EQ); /* two names of one file: both are left */
        if (is_one < 0 || (!is_one && lose(core, replaced, &other, &new) < 0))
            goto end;
        if (is_one) {
            result = 0;
            goto end;
        }
    }
    result = move(core, source, &old, &new) < 0 ? RAISED : 0;
end:
    Py_XDECREF(source);
    Py_XDECREF(replaced);
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
