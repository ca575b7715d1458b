/* The tables of what is open: OpenHandles, FairShares and Passthrough, changed as they change themselves. */
#include "core.h"

#include <sys/ioctl.h>

enum { FOPEN_KEEP_CACHE = 1 << 1, FOPEN_PASSTHROUGH = 1 << 7 };
enum { LEAST_DIRECTORIES = 16 }; /* as in open_handles.py */
static const unsigned long BACKING_OPEN = 0x4010E501, BACKING_CLOSE = 0x4004E502; /* FUSE_DEV_IOC_* */
static const uint32_t NOBODY = 65534;

int set_number(PyObject *object, PyObject *name, int64_t value) {
    PyObject *number = PyLong_FromLongLong(value);
    int error = number == NULL ? -1 : PyObject_SetAttr(object, name, number);
    Py_XDECREF(number);
    return error;
}

/* Add to a number of an object's. Returns 0, or -1 with an exception. */
int add_to(PyObject *object, PyObject *name, int64_t more) {
    uint64_t value;
    return number_of(object, name, &value) < 0 ? -1 : set_number(object, name, (int64_t)value + more);
}

/* A uid has more handles, or fewer: FairShares.add. */
static int share(Core *core, uint64_t uid, int more) {
    PyObject *key = PyLong_FromUnsignedLongLong(uid), *has, *sum = NULL;
    int error = -1;
    if (key == NULL || add_to(core->shares, names._n_given, more) < 0)
        goto end;
    has = PyDict_GetItemWithError(core->shares_of_uids, key);
    long long value = has == NULL ? more : PyLong_AsLongLong(has) + more;
    if (!PyErr_Occurred() && !value)
        error = PyDict_DelItem(core->shares_of_uids, key);
    else if (!PyErr_Occurred() && (sum = PyLong_FromLongLong(value)) != NULL)
        error = PyDict_SetItem(core->shares_of_uids, key, sum);
end:
    Py_XDECREF(key);
    Py_XDECREF(sum);
    return error;
}

/* Room for a handle of the caller's, as Opening.make_room: without asking where a quarter is not given yet, of which
 * nobody may be refused any. Directories' fds may be closed for it. Returns 0, or -1 with an exception. */
int make_room(Request *request) {
    Core *core = request->core;
    uint64_t n_given, n;
    if (number_of(core->shares, names._n_given, &n_given) < 0 || number_of(core->shares, names._n, &n) < 0)
        return -1;
    int64_t n_left = (int64_t)core->n_fds - PyDict_Size(core->handles) - 1;
    if (4 * n_given <= n && PyDict_Size(core->open_directories) < n_left && n_left > LEAST_DIRECTORIES)
        return set_number(core->directories, names._n_fds, n_left);
    PyObject *uid = PyLong_FromUnsignedLong(request->uid);
    PyObject *room = uid == NULL ? NULL : PyObject_CallFunctionObjArgs(core->make_room, uid, NULL);
    Py_XDECREF(uid);
    Py_XDECREF(room);
    return room == NULL ? -1 : 0;
}

/* The credentials that a user's files are written with, as Passthrough knows them; borrowed. NULL: an exception. */
static PyObject *writer_of(Core *core, uint32_t uid) {
    PyObject *key = PyLong_FromUnsignedLong(uid);
    PyObject *writer = key == NULL ? NULL : PyDict_GetItemWithError(core->writers, key);
    if (writer == NULL && key != NULL && !PyErr_Occurred()) {
        writer = PyObject_CallFunction(core->writers_of, "KiO", (unsigned long long)core->root_dev, core->root_fd, key);
        if (writer != NULL && PyDict_SetItem(core->writers, key, writer) < 0)
            Py_CLEAR(writer);
        Py_XDECREF(writer); /* the dict has it */
    }
    Py_XDECREF(key);
    return writer;
}

/* Whether Python has something for a node in a dict. */
static bool is_in(PyObject *dict, const Node *node) {
    return node->object != NULL && PyDict_GetItemWithError(dict, node->object) != NULL;
}

/* Whether a file that is opened now gets an id to be passed through by, where Passthrough.opened gives one to a node
 * that is not open yet. node: NULL for a new file. Returns 0, or -1 with an exception. */
int prepare_opening(Request *request, Node *node, uint32_t flags, Opening *opening) {
    Core *core = request->core;
    bool maps = (flags & O_ACCMODE) == O_RDWR;
    memset(opening, 0, sizeof *opening);
    if ((maps && (node != NULL || !core->is_shared)) || is_none(core->passthrough, names._give_up))
        return 0;
    if (node != NULL && is_in(core->modes, node))
        return 0;
    PyObject *nobody = PyErr_Occurred() ? NULL : writer_of(core, NOBODY);
    if (nobody == NULL)
        return -1;
    opening->nobody.uid = (uint32_t)PyLong_AsUnsignedLongMask(PyTuple_GetItem(nobody, 0));
    opening->nobody.gid = (uint32_t)PyLong_AsUnsignedLongMask(PyTuple_GetItem(nobody, 1));
    opening->passes = true;
    return 0;
}

/* As file_writer. */
static uint32_t owner_to_write_as(const Seen *seen) {
    return seen->uid ? seen->uid : seen->mode & (S_IWGRP | S_IWOTH) ? NOBODY : 0;
}

/* Get the id for a file that was just opened, if there is to be one; without the interpreter's lock. */
void open_backing(const Request *request, int fd, const Seen *seen, Opening *opening) {
    const Core *core = request->core;
    struct {
        int32_t fd;
        uint32_t flags;
        uint64_t padding;
    } map = {.fd = fd};
    int id = -1;
    if (!opening->passes || seen->dev != core->root_dev)
        return;
    Actor writer = opening->nobody;
    opening->owner = owner_to_write_as(seen);
    if (opening->owner != NOBODY && writer.gid) /* in no group: else as itself, for all */
        writer.uid = opening->owner;
    if (act_begin(core, &writer) == 0)
        id = ioctl(core->device, BACKING_OPEN, &map);
    act_end(core, &writer);
    opening->id = id > 0 ? id : 0;
}

static void close_backing(const Core *core, int id) {
    uint32_t number = (uint32_t)id;
    ioctl(core->device, BACKING_CLOSE, &number);
}

/* What was opened is not to be had after all. */
void leave_opening(Request *request, int fd, const Opening *opening) {
    if (opening->id)
        close_backing(request->core, opening->id);
    if (fd >= 0)
        close(fd);
}

static int set_add(PyObject *set, PyObject *item) {
    int has = PySet_Contains(set, item);
    return has < 0 ? -1 : has ? 0 : PySet_Add(set, item);
}

/* A node is open by an id, as Passthrough.opened: it was not open before. */
static int pass(Core *core, PyObject *node, const Source *key, PyObject *handle, bool writes, const Opening *opening) {
    PyObject *writer = writer_of(core, opening->owner);
    PyObject *mode = NULL, *source = source_object(key);
    if (writer != NULL && source != NULL)
        mode = PyObject_CallFunction(core->OpenMode, "iOii", opening->id, writer, 1, (int)writes);
    int error = mode == NULL ? -1 : PyDict_SetItem(core->modes, node, mode);
    Py_XDECREF(mode);
    if (!error)
        error = set_add(core->passed_by, source);
    if (!error && writes)
        error = PySet_Add(core->passing_writers, handle) < 0 ? -1 : set_add(core->unsteady, source);
    Py_XDECREF(source);
    return error;
}

/* A handle of a node, as OpenHandles.add. */
static int add_handle(Request *request, PyObject *node, PyObject *handle, uint32_t flags) {
    Core *core = request->core;
    PyObject *uid = PyLong_FromUnsignedLong(request->uid), *fds = NULL;
    int error = -1;
    if (uid == NULL || PyDict_SetItem(core->handles, handle, node) < 0 ||
        PyDict_SetItem(core->openers, handle, uid) < 0 || share(core, request->uid, 1) < 0)
        goto end;
    fds = PyDict_GetItemWithError(core->open_files, node);
    fds = fds != NULL ? Py_NewRef(fds) : PyErr_Occurred() ? NULL : PyList_New(0);
    if (fds == NULL || PyDict_SetItem(core->open_files, node, fds) < 0 || PyList_Append(fds, handle) < 0)
        goto end;
    if (flags & O_APPEND && PySet_Add(core->to_append, handle) < 0)
        goto end;
    error = 0;
end:
    Py_XDECREF(uid);
    Py_XDECREF(fds);
    return error;
}

/* Have a handle of a node as Opening.opened has it, with all cases that there are. Returns the id, or -1. */
static int open_by_python(Request *request, PyObject *node, PyObject *handle, uint32_t flags, const Seen *seen) {
    uint32_t writer = owner_to_write_as(seen);
    PyObject *backing = PyObject_CallFunction(request->core->opened, "OOIII", node, handle, request->uid, flags, writer);
    int id = backing == NULL ? -1 : (int)PyLong_AsLong(backing);
    Py_XDECREF(backing);
    return id;
}

/* Have a handle of a node, by an fd that is the tables' from now on, and put struct fuse_open_out. Returns it, the
 * caller's own; NULL: an exception. opening: prepared, and after `open_backing` */
PyObject *put_handle(Request *request, Node *node, int fd, uint32_t flags, const Seen *seen,
                     bool is_new, Opening *opening, char *to) {
    Core *core = request->core;
    PyObject *handle = PyObject_CallFunction(core->Fd, "i", fd), *object = object_of(node);
    if (handle == NULL || object == NULL) {
        close(fd);
        goto error;
    }
    int32_t id = opening->id;
    bool is_ours = id && !is_in(core->modes, node); /* nobody else has opened it meanwhile */
    if (is_ours) {
        bool writes = (flags & O_ACCMODE) != O_RDONLY;
        Source source = source_of_node(node);
        if (pass(core, object, &source, handle, writes, opening) < 0 || add_handle(request, object, handle, flags) < 0)
            goto error;
        node->n_open++;
        free(node->last); /* if its last link went while it was being opened */
        node->last = NULL;
        if (writes)
            node->told_until_s = 0;
    } else {
        if (id)
            close_backing(core, id);
        id = open_by_python(request, object, handle, flags, seen);
    }
    uint32_t told = id > 0 ? FOPEN_PASSTHROUGH : is_new || !core->is_shared ? FOPEN_KEEP_CACHE : 0;
    int is_kept = id < 0 ? -1 : told ? 0 : is_so(PyObject_CallFunctionObjArgs(core->keeps_pages, object, handle, NULL));
    if (is_kept < 0)
        goto error;
    told |= is_kept ? FOPEN_KEEP_CACHE : 0;
    opening->id = id;
    uint64_t fh = (uint64_t)fd;
    memcpy(to, &fh, sizeof fh);
    memcpy(to + 8, &told, sizeof told);
    memcpy(to + 12, &id, sizeof id);
    Py_DECREF(object);
    return handle;
error:
    Py_XDECREF(object);
    Py_XDECREF(handle);
    return NULL;
}

/* Let a handle go, as Opening.release: its node's only one, passed through, of what has a name, and the kernel knows.
 * Returns as an operation. */
int let_go(Request *request, PyObject *handle) {
    Core *core = request->core;
    PyObject *object = PyDict_GetItemWithError(core->handles, handle), *mode, *opener;
    uint64_t n_open, id;
    if (object == NULL || !is_empty(core->lock, names._away) || is_borrowed(core, request->worker, handle))
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    Node *node = node_from(object);
    mode = PyDict_GetItemWithError(core->modes, object);
    opener = PyDict_GetItemWithError(core->openers, handle);
    if (mode == NULL || opener == NULL || node->at.parent == NULL || number_of(mode, names.n_open, &n_open) < 0 ||
        number_of(mode, names.backing_id, &id) < 0)
        return PyErr_Occurred() ? RAISED : NOT_OURS;
    if (n_open != 1 || node->n_open != 1 || !id || !node->nlookup)
        return NOT_OURS;
    Py_INCREF(object);
    Source key = source_of_node(node);
    PyObject *source = source_object(&key);
    uint64_t uid = PyLong_AsUnsignedLongLong(opener);
    int result = RAISED, fd = (int)PyLong_AsLong(handle), error = 0;
    if (source == NULL || share(core, uid, -1) < 0 || PyDict_DelItem(core->openers, handle) < 0 ||
        PyDict_DelItem(core->handles, handle) < 0 || PyDict_DelItem(core->open_files, object) < 0 ||
        PySet_Discard(core->executed, handle) < 0 || PySet_Discard(core->to_append, handle) < 0 ||
        PyDict_DelItem(core->modes, object) < 0 ||
        PySet_Discard(core->passing_writers, handle) < 0)
        goto end;
    if (!has_node(core->mapped, node) &&
        (PySet_Discard(core->passed_by, source) < 0 || PySet_Discard(core->unsteady, source) < 0))
        goto end;
    if (calls_begin(request) < 0)
        goto end;
    node->n_open--;
    close_backing(core, (int)id);
    error = close(fd) < 0 ? errno : 0;
    result = calls_end(request) < 0 ? RAISED : -error;
end:
    Py_DECREF(object);
    Py_XDECREF(source);
    return result;
}
