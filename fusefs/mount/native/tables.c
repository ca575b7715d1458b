/* The tables: read, and changed as the Python code changes them; with the interpreter's lock. */
#include "core.h"

static const uint64_t ROOT = 1, PRIVATE = 1ull << 62; /* as in inode_table.py */
static const char STORE[] = ".trashd"; /* and what begins so: no such name is ours */
enum { UID_DIGITS = 10, N_HEX = 12 };  /* core/names.py, whose */

uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

bool is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    bool is_it = value != NULL && PyObject_IsTrue(value) == 1;
    Py_XDECREF(value);
    return is_it;
}

/* Returns 0, or -1 with an exception. */
int number_of(PyObject *object, PyObject *name, uint64_t *value) {
    PyObject *number = PyObject_GetAttr(object, name);
    if (number == NULL)
        return -1;
    *value = PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

bool is_none(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    return value == Py_None;
}

bool is_empty(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    bool is_it = value != NULL && PyObject_Size(value) == 0;
    Py_XDECREF(value);
    return is_it;
}

/* Call something with one argument, for what it does. Returns 0, or -1 with an exception. */
static int tell(PyObject *function, PyObject *argument) {
    PyObject *nothing = PyObject_CallFunctionObjArgs(function, argument, NULL);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* The errno of the exception that is set, which is none any more. */
int failed(Core *core) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *number = PyObject_CallFunctionObjArgs(core->fails, error, core->requests, NULL);
    long value = number == NULL ? EIO : PyLong_AsLong(number);
    Py_XDECREF(number);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Clear();
    return (int)value;
}

/* Tell how long some looks have taken together, if that says anything of the filesystem. */
int tell_took(Request *request, const Timed *timed, int n) {
    Core *core = request->core;
    PyObject *latency = PyObject_GetAttr(core->lock, names._latency);
    bool is_in_doubt = latency != NULL && latency != Py_None && is_true(latency, names.is_in_doubt);
    bool tells = latency != Py_None && timed->tells && (is_in_doubt || timed->ns > n * core->quick_ns);
    __atomic_store_n(&core->is_in_doubt, is_in_doubt, __ATOMIC_RELAXED); /* it is read during calls */
    Py_XDECREF(latency);
    if (!tells || latency == NULL)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *ns = PyLong_FromUnsignedLongLong(timed->ns), *looks = PyLong_FromLong(n), *nothing = NULL;
    if (ns != NULL && looks != NULL)
        nothing = PyObject_CallMethodObjArgs(core->lock, names.took, ns, looks, NULL);
    Py_XDECREF(ns);
    Py_XDECREF(looks);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* Whether a request is an ordinary one: the filesystem answers quickly, and the caller has not just had ESTALE. */
int is_at_rest(const Request *request) {
    Core *core = request->core;
    if (PyObject_Size(core->retries)) {
        PyObject *pid = PyLong_FromUnsignedLong(request->pid);
        int is_retry = pid == NULL ? -1 : PyDict_Contains(core->retries, pid);
        Py_XDECREF(pid);
        if (is_retry)
            return false;
    }
    if (is_true(core->lock, names.is_slow) || is_true(core->requests, names.is_careful))
        return false;
    return is_true(core->metadata, names.is_idle);
}

/* Nodes. */

/* The live node of a nodeid, the caller's own; NULL: not ours, or an exception. */
PyObject *node_of(Request *request, uint64_t nodeid) {
    PyObject *key = PyLong_FromUnsignedLongLong(nodeid);
    if (key == NULL)
        return NULL;
    PyObject *node = PyDict_GetItemWithError(request->core->by_nodeid, key);
    Py_DECREF(key);
    if (node == NULL || !is_none(node, names.last))
        return NULL;
    Py_INCREF(node);
    return node;
}

/* Whether a node lies outside of all stores. */
bool is_outside(Core *core, PyObject *node) {
    uint64_t epoch, now;
    PyObject *zone;
    if (number_of(node, names.epoch, &epoch) < 0 || number_of(core->nodes, names._epoch, &now) < 0)
        return false;
    zone = epoch == now ? PyObject_GetAttr(node, names.zone) : PyObject_CallFunctionObjArgs(core->zone_of, node, NULL);
    Py_XDECREF(zone);
    return zone == core->outside;
}

/* Whether a directory is on the volume's own filesystem, outside of all stores, and its letter case matters. */
static bool is_plain(Core *core, PyObject *directory) {
    if (!is_outside(core, directory))
        return false;
    PyObject *source = PyObject_GetAttr(directory, names.source);
    PyObject *device = source == NULL ? NULL : PyTuple_GetItem(source, 0);
    bool is_here = device != NULL && PyLong_AsUnsignedLongLong(device) == core->root_dev &&
                   PyDict_GetItemWithError(core->folding, device) == Py_False;
    Py_XDECREF(source);
    return is_here;
}

bool is_root(const Core *core, uint64_t nodeid) { return nodeid == ROOT || nodeid == core->top; }

/* Whether a name may be a store's own. */
bool is_stores(const char *name) { return !strncmp(name, STORE, sizeof STORE - 1); }

/* Whether a look at a name may have to wait for what is mounted there: 1, 0, or -1 with an exception. Any mount point of
 * that name may be meant: their directories are not known. */
int may_wait(const Core *core, PyObject *name) {
    PyObject *waiting = PyObject_GetAttr(core->submounts, names.names);
    int is_it = waiting == NULL ? -1 : PySet_Contains(waiting, name);
    Py_XDECREF(waiting);
    return is_it;
}

/* Whether a name is a store's: store/layout.py, is_stores_own. */
bool is_stores_own(const char *name) {
    static const char hex[] = "0123456789abcdef", digits[] = "0123456789", made[] = ".new-";
    if (!is_stores(name))
        return false;
    name += sizeof STORE - 1;
    if (*name == '\0' || !strncmp(name, made, sizeof made - 1))
        return true;
    if (*name++ != '-')
        return false;
    size_t n = strspn(name, digits);
    bool is_plain = n && n <= UID_DIGITS && (n == 1 || *name != '0') && strtoull(name, NULL, 10) < UINT32_MAX;
    if (!is_plain || name[n] == '\0')
        return is_plain;
    name += n + 1;
    return name[-1] == '.' && strlen(name) == N_HEX && strspn(name, hex) == N_HEX;
}

/* The fd of a directory, of the tables' own; -1: none is open. */
int directory_fd(Request *request, PyObject *node, uint64_t nodeid) {
    Core *core = request->core;
    if (is_root(core, nodeid))
        return core->root_fd;
    PyObject *fd = PyDict_GetItemWithError(core->open_directories, node);
    if (fd == NULL || tell(core->used, node) < 0)
        return -1;
    if (PyList_Append(request->worker->borrowed, fd) < 0)
        return -1;
    return (int)PyLong_AsLong(fd);
}

/* A directory, and a name in it if there is one; both plain. Returns 0, or -1: not ours, or an exception. */
int open_place(Request *request, uint64_t nodeid, const char *name, Place *place) {
    memset(place, 0, sizeof *place);
    if (name != NULL && is_stores(name))
        return -1;
    place->node = node_of(request, nodeid);
    if (place->node == NULL || !is_plain(request->core, place->node))
        goto not_ours;
    place->fd = directory_fd(request, place->node, nodeid);
    if (place->fd < 0)
        goto not_ours;
    if (name != NULL) {
        place->name = PyBytes_FromString(name);
        if (place->name == NULL || may_wait(request->core, place->name))
            goto not_ours;
        place->text = PyBytes_AsString(place->name);
    }
    return 0;
not_ours:
    close_place(place);
    return -1;
}

void close_place(Place *place) {
    Py_CLEAR(place->node);
    Py_CLEAR(place->name);
}

/* Which incarnation was seen, as `source_key`. */
PyObject *source_of(const Seen *seen) {
    return Py_BuildValue("Ky#", (unsigned long long)seen->dev, (const char *)&seen->handle,
                         (Py_ssize_t)(2 * sizeof(uint32_t) + seen->handle.n_bytes));
}

static PyObject *in_ns(int64_t seconds, uint32_t ns) {
    return PyLong_FromLongLong(seconds * 1000000000ll + ns);
}

PyObject *attributes_of(Core *core, const Seen *seen) {
    PyObject *fields = PyTuple_New(14), *told = NULL;
    if (fields == NULL)
        return NULL;
    const uint64_t numbers[] = {seen->dev, seen->ino,  seen->mode, seen->nlink,  seen->uid,
                                seen->gid, seen->rdev, seen->size, seen->blocks, seen->blksize};
    for (int at = 0; at < 10; at++)
        PyTuple_SetItem(fields, at, PyLong_FromUnsignedLongLong(numbers[at]));
    PyTuple_SetItem(fields, 10, in_ns(seen->atime_s, seen->atime_ns));
    PyTuple_SetItem(fields, 11, in_ns(seen->mtime_s, seen->mtime_ns));
    PyTuple_SetItem(fields, 12, in_ns(seen->ctime_s, seen->ctime_ns));
    PyTuple_SetItem(fields, 13, PyLong_FromLongLong(seen->btime_ns));
    PyObject *arguments = PyErr_Occurred() ? NULL : PyTuple_Pack(1, fields);
    if (arguments != NULL) {
        newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
        told = new_tuple((PyTypeObject *)core->Attributes, arguments, NULL);
        Py_DECREF(arguments);
    }
    Py_DECREF(fields);
    return told;
}

/* Whether a node is known by that name in that directory: 1, 0, or -1 with an exception. */
int is_at(PyObject *node, const Place *place, PyObject *name) {
    PyObject *parent = PyObject_GetAttr(node, names.parent), *known = PyObject_GetAttr(node, names.name);
    int is_it = known == NULL || parent == NULL ? -1 : parent == place->node ? PyObject_RichCompareBool(known, name, Py_EQ) : 0;
    Py_XDECREF(parent);
    Py_XDECREF(known);
    return is_it;
}

/* A new node by its own inode number, as Node makes it; NULL: that number is not to be had, or an exception. */
static PyObject *new_node(Core *core, const Place *place, const Seen *seen, PyObject *source) {
    PyObject *nodeid, *node = NULL, *empty = NULL, *epoch = NULL;
    if (seen->dev != core->root_dev || seen->ino <= ROOT || seen->ino >= PRIVATE || is_stores(place->text))
        return NULL;
    nodeid = PyLong_FromUnsignedLongLong(seen->ino);
    if (nodeid == NULL || PyDict_Contains(core->by_nodeid, nodeid))
        goto error;
    empty = PyTuple_New(0);
    epoch = PyObject_GetAttr(core->nodes, names._epoch);
    if (empty == NULL || epoch == NULL)
        goto error;
    node = ((newfunc)PyType_GetSlot((PyTypeObject *)core->Node, Py_tp_new))((PyTypeObject *)core->Node, empty, NULL);
    if (node == NULL || PyObject_SetAttr(node, names.nodeid, nodeid) < 0 ||
        PyObject_SetAttr(node, names.source, source) < 0 || PyObject_SetAttr(node, names.ino, nodeid) < 0 ||
        set_number(node, names.btime_ns, seen->btime_ns) < 0 ||
        PyObject_SetAttr(node, names.is_directory, S_ISDIR(seen->mode) ? Py_True : Py_False) < 0 ||
        PyObject_SetAttr(node, names.parent, place->node) < 0 || PyObject_SetAttr(node, names.name, place->name) < 0 ||
        PyObject_SetAttr(node, names.others, Py_None) < 0 || set_number(node, names.nlookup, 0) < 0 ||
        set_number(node, names.n_open, 0) < 0 || PyObject_SetAttr(node, names.last, Py_None) < 0 ||
        PyObject_SetAttr(node, names.is_told, Py_False) < 0 ||
        PyObject_SetAttr(node, names.told_until_s, core->never) < 0 ||
        PyObject_SetAttr(node, names.zone, core->outside) < 0 || PyObject_SetAttr(node, names.epoch, epoch) < 0 ||
        PyDict_SetItem(core->by_nodeid, nodeid, node) < 0 || PyDict_SetItem(core->by_source, source, node) < 0)
        Py_CLEAR(node);
error:
    Py_XDECREF(nodeid);
    Py_XDECREF(empty);
    Py_XDECREF(epoch);
    return node;
}

/* The node of what was seen under a name in a plain directory, as InodeTable.learn; the caller's own. NULL: an
 * exception. */
PyObject *learn(Request *request, const Place *place, const Seen *seen, PyObject *source) {
    Core *core = request->core;
    PyObject *node = PyDict_GetItemWithError(core->by_source, source);
    if (node != NULL) {
        int is_known = is_at(node, place, place->name);
        if (is_known)
            return is_known < 0 ? NULL : Py_NewRef(node);
    } else if (!PyErr_Occurred() && !request->was_away) { /* else the directory may be in a store by now */
        node = new_node(core, place, seen, source);
        if (node != NULL)
            return node;
    }
    PyObject *told = PyErr_Occurred() ? NULL : attributes_of(core, seen);
    if (told == NULL)
        return NULL;
    node = PyObject_CallFunctionObjArgs(core->learn, source, told, place->node, place->name, NULL);
    Py_DECREF(told);
    return node;
}

/* What a call of Python's has said: 1, 0, or -1 with an exception. */
int is_so(PyObject *said) {
    int is_it = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return is_it;
}

/* Something in a directory has changed, as AttrTimeouts.changed. Returns 0, or -1 with an exception. */
int changed(Core *core, PyObject *node) {
    PyObject *nodeid = PyObject_GetAttr(node, names.nodeid), *now = PyFloat_FromDouble(now_ns() / 1e9);
    int is_told = -1;
    if (nodeid != NULL && now != NULL && PyDict_SetItem(core->changed_s, nodeid, now) == 0)
        is_told = PySet_Contains(core->told, nodeid);
    Py_XDECREF(nodeid);
    Py_XDECREF(now);
    if (is_told != 1)
        return is_told;
    PyObject *nothing = PyObject_CallMethodObjArgs(core->timeouts, names.changed, node, NULL);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* What was changed is to be forgotten, if others have learnt anything meanwhile; as DaemonCache.changes.
 * source, place, other: may be NULL. Returns 0, or -1 with an exception. */
int forget_changed(Request *request, PyObject *source, const Place *place, const Place *other) {
    Core *core = request->core;
    if (!request->was_away || is_true(core->metadata, names.is_idle))
        return 0;
    PyObject *sources = source == NULL ? PyTuple_New(0) : PyTuple_Pack(1, source), *places, *nothing = NULL;
    if (place == NULL)
        places = PyTuple_New(0);
    else if (other == NULL)
        places = Py_BuildValue("((OO))", place->node, place->name);
    else
        places = Py_BuildValue("((OO)(OO))", place->node, place->name, other->node, other->name);
    if (sources != NULL && places != NULL)
        nothing = PyObject_CallFunctionObjArgs(core->forget, sources, places, NULL);
    Py_XDECREF(sources);
    Py_XDECREF(places);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* The kernel has one more reference. Returns 0, or -1 with an exception. */
int counted(PyObject *node, bool is_told) {
    uint64_t n;
    if (number_of(node, names.nlookup, &n) < 0)
        return -1;
    PyObject *more = PyLong_FromUnsignedLongLong(n + 1);
    int error = more == NULL ? -1 : PyObject_SetAttr(node, names.nlookup, more);
    Py_XDECREF(more);
    return error < 0 || !is_told ? error : PyObject_SetAttr(node, names.is_told, Py_True);
}

/* An fd of some handle of a node that is open, as OpenHandles.fd_of; -1: none. Returns 0, or -1 with an exception. */
int fd_of_open(Request *request, PyObject *node) {
    PyObject *fds = PyDict_GetItemWithError(request->core->open_files, node);
    PyObject *fd = fds == NULL ? NULL : PyList_GetItem(fds, 0);
    if (fd == NULL || PyList_Append(request->worker->borrowed, fd) < 0)
        return -1;
    return (int)PyLong_AsLong(fd);
}
