/* The tables: read, and changed as the Python code changes them; with the interpreter's lock. */
#include "core.h"

static const char STORES[] = ".trashd"; /* and what begins so: no such name is ours */
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

bool is_empty(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    bool is_it = value != NULL && PyObject_Size(value) == 0;
    Py_XDECREF(value);
    return is_it;
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

/* The node of a nodeid that has not lost its last link, with one use; NULL: not ours. */
Node *live_node(const Request *request, uint64_t nodeid) {
    Node *node = node_of(request->core->tables, nodeid);
    return node == NULL || node->last != NULL ? NULL : node_take(node);
}

bool is_root(const Core *core, const Node *node) { return node == core->tables->root; }

/* Whether a node lies outside of all stores. */
bool is_outside(Core *core, Node *node) { return zone_of(core->tables, node) == OUTSIDE; }

/* Whether a directory is on the volume's own filesystem, outside of all stores, and its letter case matters. */
static bool is_plain(Core *core, Node *directory) {
    if (!is_outside(core, directory) || directory->dev != core->root_dev)
        return false;
    PyObject *device = PyLong_FromUnsignedLongLong(directory->dev);
    bool is_known = device != NULL && PyDict_GetItemWithError(core->folding, device) == Py_False;
    Py_XDECREF(device);
    return is_known;
}

/* Whether a name may be a store's own. */
bool is_stores(const char *name) { return !strncmp(name, STORES, sizeof STORES - 1); }

/* Whether a look at a name may have to wait for what is mounted there: 1, 0, or -1 with an exception. Any mount point of
 * that name may be meant: their directories are not known. */
int may_wait(const Core *core, const char *name) {
    PyObject *waiting = PyObject_GetAttr(core->submounts, names.names);
    PyObject *text = waiting == NULL || !PyObject_Size(waiting) ? NULL : PyBytes_FromString(name);
    int is_it = waiting == NULL ? -1 : text == NULL ? (PyErr_Occurred() ? -1 : 0) : PySet_Contains(waiting, text);
    Py_XDECREF(waiting);
    Py_XDECREF(text);
    return is_it;
}

/* Whether a name is a store's: store/layout.py, is_stores_own. */
bool is_stores_own(const char *name) {
    static const char hex[] = "0123456789abcdef", digits[] = "0123456789", made[] = ".new-";
    if (!is_stores(name))
        return false;
    name += sizeof STORES - 1;
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

/* A directory, and a name in it if there is one; both plain. Returns 0, or -1: not ours, or an exception. */
int open_place(Request *request, uint64_t nodeid, const char *name, Place *place) {
    *place = (Place){.name = name};
    if (name != NULL && (is_stores(name) || may_wait(request->core, name)))
        return -1;
    place->node = live_node(request, nodeid);
    if (place->node != NULL && is_plain(request->core, place->node))
        place->fd = directory_fd(request->core->tables, place->node);
    if (place->fd != NULL)
        return 0;
    close_place(place);
    return -1;
}

void close_place(Place *place) {
    fd_put(place->fd);
    node_put(place->node);
    *place = (Place){0};
}

/* The node of what was seen under a name in a plain directory, with one use. */
Node *learn(Request *request, const Place *place, const Seen *seen) {
    Source source = source_of(seen);
    return node_take(
        learn_node(request->core->tables, &source, S_ISDIR(seen->mode), seen->nlink > 1, place->node, place->name));
}

/* What a call of Python's has said: 1, 0, or -1 with an exception. */
int is_so(PyObject *said) {
    int is_it = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return is_it;
}

/* What the kernel believes. */

/* Have the kernel ask for attributes when they are wanted next, as forget_attributes. */
void notify_attributes(const Tables *t, const Node *node) {
    struct {
        uint32_t size;
        int32_t code;
        uint64_t unique, nodeid;
        int64_t offset, length;
    } notice = {sizeof notice, 2, 0, node->nodeid, -1, 0};
    if (t->device >= 0 && write(t->device, &notice, sizeof notice) < 0) { /* it does not know it, or not any more */
    }
}

/* Something in a directory, or of itself, has changed, as AttrTimeouts.changed. */
void changed(Tables *t, Node *node) {
    node->changed_s = (double)now_ns() / 1e9;
    if (node->is_lasting) {
        node->is_lasting = false;
        notify_attributes(t, node);
    }
}

/* What the kernel was sent of a node is void, and what is under way to it. */
void renew(Tables *t, Node *node) {
    node->is_told = false;
    node->told_until_s = 0;
    notify_attributes(t, node);
}

/* Whether the kernel's pages of a file or directory are right, that was just opened and looked at.
 *
 * They are, where others change a file or the names in a directory behind the mount, if its times and size are those of
 * the last open, and had been so for a while then: clocks of filesystems tick slowly, and what is written in the same
 * tick can't be told apart. */
bool pages_are_right(Node *node, const Seen *seen) {
    static const int64_t RACY_NS = 2000000000, NANO = 1000000000; /* as old as the slowest clock of a filesystem */
    int64_t mtime_ns = seen->mtime_s * NANO + seen->mtime_ns, ctime_ns = seen->ctime_s * NANO + seen->ctime_ns;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    bool are_right = node->page_size == (int64_t)seen->size && node->page_mtime_ns == mtime_ns &&
                     node->page_ctime_ns == ctime_ns;
    int64_t age_ns = now.tv_sec * NANO + now.tv_nsec - (mtime_ns > ctime_ns ? mtime_ns : ctime_ns);
    node->page_mtime_ns = mtime_ns, node->page_ctime_ns = ctime_ns;
    node->page_size = age_ns > RACY_NS ? (int64_t)seen->size : -1;
    return are_right;
}

/* What was changed is to be forgotten, if others have learnt anything meanwhile; as DaemonCache.changes.
 * node, place, other: may be NULL. Returns 0, or -1 with an exception. */
int forget_changed(Request *request, const Node *node, const Place *place, const Place *other) {
    Core *core = request->core;
    if (!request->was_away || is_true(core->metadata, names.is_idle))
        return 0;
    PyObject *sources = PyList_New(0), *places = PyList_New(0), *nothing = NULL, *one = NULL;
    bool is_made = sources != NULL && places != NULL;
    if (is_made && node != NULL) {
        Source source = source_of_node(node);
        one = source_object(&source);
        is_made = one != NULL && PyList_Append(sources, one) == 0;
        Py_XDECREF(one);
    }
    const Place *const changed_places[] = {place, other};
    for (int at = 0; at < 2; at++)
        if (is_made && changed_places[at] != NULL) {
            one = Py_BuildValue("Ny", object_of(changed_places[at]->node), changed_places[at]->name);
            is_made = one != NULL && PyList_Append(places, one) == 0;
            Py_XDECREF(one);
        }
    if (is_made)
        nothing = PyObject_CallFunctionObjArgs(core->forget, sources, places, NULL);
    Py_XDECREF(sources);
    Py_XDECREF(places);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* The kernel has one more reference. */
void counted(Node *node, bool is_told) {
    node->nlookup++;
    node->is_told |= is_told;
}
