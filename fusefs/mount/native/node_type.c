/* Nodes and fds for Python: thin objects over the C structures.
 *
 * A Node object is made when Python asks for it, and is the same for as long as Python has it. It is used with the
 * tables' lock; the last use may go without. */
#include "core.h"

#ifdef __SANITIZE_ADDRESS__ /* make sanitize: only daemons have such a module, and each use of the tables has the lock */
#define WITH_TABLES()                                                                                                  \
    if (!holds_tables)                                                                                                 \
    Py_FatalError("the tables are used without their lock")
#else
#define WITH_TABLES()
#endif

static PyTypeObject *node_type, *fd_use_type;
static PyObject *attributes_type, *fd_type;

typedef struct {
    PyObject_HEAD
    Node *node; /* one use */
} NodeObject;

/* A new reference to what Python has of a node; None for NULL. */
PyObject *object_of(Node *node) {
    if (node == NULL)
        Py_RETURN_NONE;
    if (node->object != NULL)
        return Py_NewRef(node->object);
    NodeObject *self = (NodeObject *)PyType_GenericAlloc(node_type, 0);
    if (self == NULL)
        return NULL;
    self->node = node_take(node);
    node->object = (PyObject *)self;
    return node->object;
}

static void node_free(NodeObject *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    self->node->object = NULL;
    node_put(self->node);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* The node of an object; NULL: an exception. */
Node *node_from(PyObject *object) {
    WITH_TABLES();
    if (!PyObject_TypeCheck(object, node_type)) {
        PyErr_SetString(PyExc_TypeError, "not a Node");
        return NULL;
    }
    return ((NodeObject *)object)->node;
}

/* Values. */

PyObject *source_object(const Source *source) {
    if (source->n_handle)
        return Py_BuildValue("Ky#", (unsigned long long)source->dev, source->handle, (Py_ssize_t)source->n_handle);
    return Py_BuildValue("KKL", (unsigned long long)source->dev, (unsigned long long)source->ino,
                         (long long)source->btime_ns);
}

/* Ns in 64 bits end in the year 2262; files may have later times. */
static const long NANO = 1000000000;

static PyObject *time_object(int64_t seconds, uint32_t ns) {
    PyObject *whole = PyLong_FromLongLong(seconds), *nano = PyLong_FromLong(NANO), *rest = PyLong_FromUnsignedLong(ns);
    PyObject *product = whole == NULL || nano == NULL ? NULL : PyNumber_Multiply(whole, nano);
    PyObject *time = product == NULL || rest == NULL ? NULL : PyNumber_Add(product, rest);
    Py_XDECREF(whole);
    Py_XDECREF(nano);
    Py_XDECREF(rest);
    Py_XDECREF(product);
    return time;
}

/* Returns 0, or -1 with an exception. */
static int time_from(PyObject *time, int64_t *seconds, uint32_t *ns) {
    PyObject *nano = PyLong_FromLong(NANO), *parts = nano == NULL ? NULL : PyNumber_Divmod(time, nano);
    if (parts != NULL) {
        *seconds = PyLong_AsLongLong(PyTuple_GetItem(parts, 0));
        *ns = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(parts, 1));
    }
    Py_XDECREF(nano);
    Py_XDECREF(parts);
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *attributes_object(const Seen *seen) {
    PyObject *fields = PyTuple_New(14), *made = NULL;
    if (fields == NULL)
        return NULL;
    const uint64_t numbers[] = {seen->dev, seen->ino,  seen->mode, seen->nlink,  seen->uid,
                                seen->gid, seen->rdev, seen->size, seen->blocks, seen->blksize};
    for (int at = 0; at < 10; at++)
        PyTuple_SetItem(fields, at, PyLong_FromUnsignedLongLong(numbers[at]));
    PyTuple_SetItem(fields, 10, time_object(seen->atime_s, seen->atime_ns));
    PyTuple_SetItem(fields, 11, time_object(seen->mtime_s, seen->mtime_ns));
    PyTuple_SetItem(fields, 12, time_object(seen->ctime_s, seen->ctime_ns));
    PyTuple_SetItem(fields, 13, PyLong_FromLongLong(seen->btime_ns));
    PyObject *arguments = PyErr_Occurred() ? NULL : PyTuple_Pack(1, fields);
    if (arguments != NULL) {
        newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
        made = new_tuple((PyTypeObject *)attributes_type, arguments, NULL);
        Py_DECREF(arguments);
    }
    Py_DECREF(fields);
    return made;
}

/* What Attributes say. Returns 0, or -1 with an exception. */
int seen_from(PyObject *attributes, Seen *seen) {
    uint64_t values[14];
    if (!PyTuple_Check(attributes) || PyTuple_Size(attributes) != 14) {
        PyErr_SetString(PyExc_TypeError, "not Attributes");
        return -1;
    }
    for (int at = 0; at < 14; at++)
        values[at] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(attributes, at));
    memset(seen, 0, sizeof *seen);
    seen->dev = values[0], seen->ino = values[1], seen->mode = (uint32_t)values[2];
    seen->nlink = (uint32_t)values[3], seen->uid = (uint32_t)values[4], seen->gid = (uint32_t)values[5];
    seen->rdev = values[6], seen->size = values[7], seen->blocks = values[8];
    seen->blksize = (uint32_t)values[9];
    int64_t *const seconds[] = {&seen->atime_s, &seen->mtime_s, &seen->ctime_s};
    uint32_t *const ns[] = {&seen->atime_ns, &seen->mtime_ns, &seen->ctime_ns};
    for (int at = 0; at < 3; at++)
        if (time_from(PyTuple_GetItem(attributes, 10 + at), seconds[at], ns[at]) < 0)
            return -1;
    seen->btime_ns = (int64_t)values[13];
    return PyErr_Occurred() ? -1 : 0;
}

/* Which incarnation a SourceKey means; the bytes stay the object's. Returns 0, or -1 with an exception. */
int source_from(PyObject *key, Source *source) {
    Py_ssize_t n = PyTuple_Check(key) ? PyTuple_Size(key) : 0;
    *source = (Source){0};
    if (n != 2 && n != 3) {
        PyErr_SetString(PyExc_TypeError, "not a SourceKey");
        return -1;
    }
    source->dev = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 0));
    if (n == 2) {
        char *bytes;
        Py_ssize_t n_bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(key, 1), &bytes, &n_bytes) < 0)
            return -1;
        source->handle = bytes, source->n_handle = (uint32_t)n_bytes;
    } else {
        source->ino = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 1));
        source->btime_ns = (int64_t)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 2));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Node. */

enum { NODEID, DEV, INO, NLOOKUP, N_OPEN };

static PyObject *get_number(NodeObject *self, void *which) {
    WITH_TABLES();
    const Node *node = self->node;
    const uint64_t values[] = {node->nodeid, node->dev, node->ino, node->nlookup, node->n_open};
    return PyLong_FromUnsignedLongLong(values[(intptr_t)which]);
}

static int set_count(NodeObject *self, PyObject *value, void *which) {
    unsigned long long number = value == NULL ? 0 : PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred())
        return -1;
    if ((intptr_t)which == NLOOKUP)
        self->node->nlookup = number;
    else
        self->node->n_open = (uint32_t)number;
    return 0;
}

enum { IS_DIRECTORY, IS_TOLD, IS_LASTING, IS_UNSTEADY, IS_PASSED, IS_EXACT };

static PyObject *get_flag(NodeObject *self, void *which) {
    WITH_TABLES();
    const Node *node = self->node;
    const bool values[] = {node->is_directory, node->is_told, node->is_lasting, is_unsteady(node),
                           node->backing != NULL || node->is_mapped, node->is_case_sensitive};
    return PyBool_FromLong(values[(intptr_t)which]);
}

static int set_flag(NodeObject *self, PyObject *value, void *which) {
    int is_it = value == NULL ? 0 : PyObject_IsTrue(value);
    Node *node = self->node;
    *((intptr_t)which == IS_TOLD      ? &node->is_told
      : (intptr_t)which == IS_LASTING ? &node->is_lasting
                                      : &node->is_case_sensitive) = is_it > 0;
    return is_it < 0 ? -1 : 0;
}

static PyObject *get_btime(NodeObject *self, void *Py_UNUSED(which)) {
    return PyLong_FromLongLong(self->node->btime_ns);
}

enum { TOLD_UNTIL, CHANGED };

static PyObject *get_time(NodeObject *self, void *which) {
    return PyFloat_FromDouble((intptr_t)which == CHANGED ? self->node->changed_s : self->node->told_until_s);
}

static int set_time(NodeObject *self, PyObject *value, void *which) {
    double time_s = value == NULL ? 0 : PyFloat_AsDouble(value);
    if (PyErr_Occurred())
        return -1;
    *((intptr_t)which == CHANGED ? &self->node->changed_s : &self->node->told_until_s) = time_s;
    return 0;
}

static PyObject *get_source(NodeObject *self, void *Py_UNUSED(which)) {
    Source source = source_of_node(self->node);
    return source_object(&source);
}

static PyObject *get_parent(NodeObject *self, void *Py_UNUSED(which)) {
    WITH_TABLES();
    return object_of(self->node->at.parent);
}

static PyObject *get_name(NodeObject *self, void *Py_UNUSED(which)) {
    WITH_TABLES();
    return PyBytes_FromString(self->node->at.name == NULL ? "" : self->node->at.name);
}

static PyObject *get_last(NodeObject *self, void *Py_UNUSED(which)) {
    WITH_TABLES();
    if (self->node->last == NULL)
        Py_RETURN_NONE;
    return attributes_object(self->node->last);
}

static PyObject *node_is_seen_in(NodeObject *self, PyObject *attributes) {
    Seen seen;
    if (seen_from(attributes, &seen) < 0)
        return NULL;
    const Node *node = self->node;
    return PyBool_FromLong(seen.ino == node->ino && seen.btime_ns == node->btime_ns && seen.dev == node->dev);
}

static PyObject *place_object(const NodeName *at) {
    PyObject *parent = object_of(at->parent);
    return parent == NULL ? NULL : Py_BuildValue("Ny", parent, at->name);
}

static PyObject *node_places(NodeObject *self, PyObject *Py_UNUSED(nothing)) {
    const Node *node = self->node;
    PyObject *places = PyList_New(0);
    for (int at = -1; places != NULL && at < (node->others == NULL ? 0 : N_OTHERS_MAX); at++) {
        const NodeName *name = at < 0 ? &node->at : &node->others[at];
        PyObject *place = name->parent == NULL ? NULL : place_object(name);
        if (PyErr_Occurred() || (place != NULL && PyList_Append(places, place) < 0))
            Py_CLEAR(places);
        Py_XDECREF(place);
    }
    PyObject *found = places == NULL ? NULL : PyObject_GetIter(places);
    Py_XDECREF(places);
    return found;
}

static PyObject *node_has_changed(NodeObject *self, PyObject *since) {
    unsigned long long number = PyLong_AsUnsignedLongLong(since);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(has_changed(self->node, number));
}

static PyGetSetDef node_getset[] = {
    {"nodeid", (getter)get_number, NULL, "The number that the kernel knows it by.", (void *)NODEID},
    {"dev", (getter)get_number, NULL, "Its device.", (void *)DEV},
    {"ino", (getter)get_number, NULL, "Its inode number.", (void *)INO},
    {"btime_ns", (getter)get_btime, NULL, "Its birth time; 0: unknown.", NULL},
    {"nlookup", (getter)get_number, (setter)set_count, "References that the kernel holds.", (void *)NLOOKUP},
    {"n_open", (getter)get_number, (setter)set_count, "Open handles.", (void *)N_OPEN},
    {"is_directory", (getter)get_flag, NULL, "Whether it is a directory.", (void *)IS_DIRECTORY},
    {"is_told", (getter)get_flag, (setter)set_flag, "Whether the kernel was sent its attributes since they were made void: the reply may still be on its way.", (void *)IS_TOLD},
    {"is_lasting", (getter)get_flag, (setter)set_flag, "Whether the kernel was sent attributes of this directory that it believes for long.", (void *)IS_LASTING},
    {"is_case_sensitive", (getter)get_flag, (setter)set_flag, "Whether letter case matters in this directory, as far as that is known.", (void *)IS_EXACT},
    {"told_until_s", (getter)get_time, (setter)set_time, "Until when the kernel may believe its name and attributes; 0: unknown, or not at all.", (void *)TOLD_UNTIL},
    {"changed_s", (getter)get_time, (setter)set_time, "When a name in it was changed; 0: never.", (void *)CHANGED},
    {"is_unsteady", (getter)get_flag, NULL, "Whether it may be written past us: its attributes may not be believed.", (void *)IS_UNSTEADY},
    {"is_passed", (getter)get_flag, NULL, "Whether it may be read or written past us: nothing of its attributes is cached.", (void *)IS_PASSED},
    {"source", (getter)get_source, NULL, "Which incarnation it is: a SourceKey.", NULL},
    {"parent", (getter)get_parent, NULL, "The directory where it was found last; None: no name is known.", NULL},
    {"name", (getter)get_name, NULL, "Its name there.", NULL},
    {"last", (getter)get_last, NULL, "Its attributes when its last link went and it was not open; else None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef node_methods[] = {
    {"is_seen_in", (PyCFunction)node_is_seen_in, METH_O, "Whether attributes can be this incarnation's: same inode number, born at the same time."},
    {"places", (PyCFunction)node_places, METH_NOARGS, "Where it may be found, the likeliest first."},
    {"has_changed", (PyCFunction)node_has_changed, METH_O, "Whether it, or a name in it, has changed since so many changes, or is being changed."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot node_slots[] = {
    {Py_tp_doc, "One incarnation of one inode."},
    {Py_tp_dealloc, node_free},
    {Py_tp_getset, node_getset},
    {Py_tp_methods, node_methods},
    {0, NULL},
};
static PyType_Spec node_spec = {
    .name = "fusefs.mount.native._core.Node",
    .basicsize = sizeof(NodeObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = node_slots,
};

/* Fds: to Python a CountedFd, an int whose use goes with the object; or with the operation, as an exception may keep the
 * object for longer. All with the interpreter's lock. */

typedef struct FdUse {
    PyObject_HEAD
    Fd *fd; /* one use; NULL: none any more */
    struct FdUse *next, **at; /* of its operation's; NULL: it was made outside of one */
} FdUse;

static _Thread_local FdUse *uses;

static void fd_use_end(FdUse *self) {
    if (self->at != NULL)
        *self->at = self->next;
    if (self->next != NULL)
        self->next->at = self->at;
    self->next = NULL, self->at = NULL;
    fd_put(self->fd);
    self->fd = NULL;
}

/* The thread's operation has ended: it uses no fds any more. */
void end_uses(void) {
    while (uses != NULL)
        fd_use_end(uses);
}

static void fd_use_free(FdUse *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    fd_use_end(self);
    if (!holds_tables && has_fds_to_close()) {
        PyThreadState *released = PyEval_SaveThread();
        close_fds();
        PyEval_RestoreThread(released);
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

/* What Python has of an fd, whose use is handed over; None for NULL. */
PyObject *fd_object(Fd *fd) {
    if (fd == NULL)
        Py_RETURN_NONE;
    FdUse *use = (FdUse *)PyType_GenericAlloc(fd_use_type, 0);
    if (use == NULL) {
        fd_put(fd);
        return NULL;
    }
    use->fd = fd;
    if (holds_tables) {
        use->next = uses, use->at = &uses;
        if (uses != NULL)
            uses->at = &use->next;
        uses = use;
    }
    return PyObject_CallFunction(fd_type, "iN", fd->number, (PyObject *)use);
}

static PyType_Slot fd_use_slots[] = {{Py_tp_doc, "A use of an fd."}, {Py_tp_dealloc, fd_use_free}, {0, NULL}};
static PyType_Spec fd_use_spec = {
    .name = "fusefs.mount.native._core.FdUse",
    .basicsize = sizeof(FdUse),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = fd_use_slots,
};

static PyObject *imported(const char *module, const char *name) {
    PyObject *found = PyImport_ImportModule(module), *value = found == NULL ? NULL : PyObject_GetAttrString(found, name);
    Py_XDECREF(found);
    return value;
}

/* Returns 0, or -1 with an exception. */
int add_node_types(PyObject *module) {
    attributes_type = imported("fusefs.core.inode_attributes", "Attributes");
    fd_type = attributes_type == NULL ? NULL : imported("fusefs.linux.fd", "CountedFd");
    fd_use_type = fd_type == NULL ? NULL : (PyTypeObject *)PyType_FromSpec(&fd_use_spec);
    node_type = fd_use_type == NULL ? NULL : (PyTypeObject *)PyType_FromSpec(&node_spec);
    return node_type == NULL ? -1 : PyModule_AddType(module, node_type);
}
