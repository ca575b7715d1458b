/* Python types Node and FdUse: thin objects over the C structures.
 *
 * A Node object is made when Python needs it; Python gets the same object as long as it refers to it. It is used with
 * the tables lock, except when the last reference is dropped. */
#include "core.h"

#ifdef __SANITIZE_ADDRESS__ /* make sanitize: only daemons have such a module, and hold the lock for each use of the
                               tables */
#define WITH_TABLES()                                                                                                  \
    if (!holds_tables)                                                                                                 \
    Py_FatalError("the tables are used without their lock")
#else
#define WITH_TABLES()
#endif

PyTypeObject *node_type, *fd_use_type;
static PyObject *attributes_type, *fd_type;

typedef struct {
    PyObject_HEAD
    Node *node; /* one reference */
} NodeObject;

/* Return a new reference to a node's Python object; None for NULL. */
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
    self->node->object = NULL;
    node_put(self->node);
    free_object(self);
}

/* Return the node of an object; NULL: an exception is set. */
Node *node_from(PyObject *object) {
    WITH_TABLES();
    if (!PyObject_TypeCheck(object, node_type)) {
        PyErr_SetString(PyExc_TypeError, "not a Node");
        return NULL;
    }
    return ((NodeObject *)object)->node;
}

/* Conversions. The functions with void * arguments are converters for PyArg_ParseTuple: they return 1, or 0 and set an
 * exception. */

int to_node(PyObject *object, void *node) { return (*(Node **)node = node_from(object)) != NULL; }

PyObject *source_object(const Source *source) {
    if (source->n_handle)
        return Py_BuildValue("Ky#", (unsigned long long)source->dev, source->handle, (Py_ssize_t)source->n_handle);
    return Py_BuildValue("KKL", (unsigned long long)source->dev, (unsigned long long)source->ino,
                         (long long)source->btime_ns);
}

/* 64 bits of nanoseconds end in the year 2262; files may have later times. */
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

/* Returns 0, or -1 and sets an exception. */
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

PyObject *attributes_object(const Stat *st) {
    PyObject *fields = PyTuple_New(14), *made = NULL;
    if (fields == NULL)
        return NULL;
    const uint64_t numbers[] = {st->dev, st->ino,  st->mode, st->nlink,  st->uid,
                                st->gid, st->rdev, st->size, st->blocks, st->blksize};
    for (int at = 0; at < 10; at++)
        PyTuple_SetItem(fields, at, PyLong_FromUnsignedLongLong(numbers[at]));
    PyTuple_SetItem(fields, 10, time_object(st->atime_s, st->atime_ns));
    PyTuple_SetItem(fields, 11, time_object(st->mtime_s, st->mtime_ns));
    PyTuple_SetItem(fields, 12, time_object(st->ctime_s, st->ctime_ns));
    PyTuple_SetItem(fields, 13, PyLong_FromLongLong(st->btime_ns));
    PyObject *arguments = PyErr_Occurred() ? NULL : PyTuple_Pack(1, fields);
    if (arguments != NULL) {
        newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
        made = new_tuple((PyTypeObject *)attributes_type, arguments, NULL);
        Py_DECREF(arguments);
    }
    Py_DECREF(fields);
    return made;
}

/* Convert Attributes. */
int to_stat(PyObject *attributes, void *to) {
    Stat *st = to;
    uint64_t values[14];
    if (!PyTuple_Check(attributes) || PyTuple_Size(attributes) != 14) {
        PyErr_SetString(PyExc_TypeError, "not Attributes");
        return 0;
    }
    for (int at = 0; at < 14; at++)
        values[at] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(attributes, at));
    memset(st, 0, sizeof *st);
    st->dev = values[0], st->ino = values[1], st->mode = (uint32_t)values[2];
    st->nlink = (uint32_t)values[3], st->uid = (uint32_t)values[4], st->gid = (uint32_t)values[5];
    st->rdev = values[6], st->size = values[7], st->blocks = values[8];
    st->blksize = (uint32_t)values[9];
    int64_t *const seconds[] = {&st->atime_s, &st->mtime_s, &st->ctime_s};
    uint32_t *const ns[] = {&st->atime_ns, &st->mtime_ns, &st->ctime_ns};
    for (int at = 0; at < 3; at++)
        if (time_from(PyTuple_GetItem(attributes, 10 + at), seconds[at], ns[at]) < 0)
            return 0;
    st->btime_ns = (int64_t)values[13];
    return !PyErr_Occurred();
}

/* Convert a SourceKey; the bytes of the handle stay the key's. */
int to_source(PyObject *key, void *to) {
    Source *source = to;
    Py_ssize_t n = PyTuple_Check(key) ? PyTuple_Size(key) : 0;
    *source = (Source){0};
    if (n != 2 && n != 3) {
        PyErr_SetString(PyExc_TypeError, "not a SourceKey");
        return 0;
    }
    source->dev = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 0));
    if (n == 2) {
        char *bytes;
        Py_ssize_t n_bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(key, 1), &bytes, &n_bytes) < 0)
            return 0;
        source->handle = bytes, source->n_handle = (uint32_t)n_bytes;
    } else {
        source->ino = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 1));
        source->btime_ns = (int64_t)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(key, 2));
    }
    return !PyErr_Occurred();
}

/* Node. */

static PyObject *get_field(NodeObject *self, void *field) {
    WITH_TABLES();
    return PyMember_GetOne((const char *)self->node, field);
}

static int set_field(NodeObject *self, PyObject *value, void *field) {
    WITH_TABLES();
    return PyMember_SetOne((char *)self->node, field, value);
}

static PyObject *get_is_unsteady(NodeObject *self, void *Py_UNUSED(field)) {
    WITH_TABLES();
    return PyBool_FromLong(is_unsteady(self->node));
}

static PyObject *get_is_passed(NodeObject *self, void *Py_UNUSED(field)) {
    WITH_TABLES();
    return PyBool_FromLong(self->node->backing != NULL || self->node->is_mapped);
}

static PyObject *get_source(NodeObject *self, void *Py_UNUSED(which)) {
    Source source = source_of_node(self->node);
    return source_object(&source);
}

static PyObject *get_parent(NodeObject *self, void *Py_UNUSED(which)) {
    WITH_TABLES();
    return object_of(self->node->found_at.parent);
}

static PyObject *get_name(NodeObject *self, void *Py_UNUSED(which)) {
    WITH_TABLES();
    return PyBytes_FromString(self->node->found_at.name == NULL ? "" : self->node->found_at.name);
}

static PyObject *get_final_stat(NodeObject *self, void *Py_UNUSED(which)) {
    WITH_TABLES();
    if (self->node->final_stat == NULL)
        Py_RETURN_NONE;
    return attributes_object(self->node->final_stat);
}

/* An attribute for a field of the C structure: its name, its type in C, and READONLY or 0. */
#define FIELD(name, type, is_read_only, text)                                                                          \
    {#name, (getter)get_field, (setter)set_field, text,                                                                \
     &(PyMemberDef){#name, type, offsetof(Node, name), is_read_only, NULL}}

static PyGetSetDef node_getset[] = {
    FIELD(nodeid, T_ULONGLONG, READONLY, "Its number in requests of the kernel."),
    FIELD(dev, T_ULONGLONG, READONLY, "Its device."),
    FIELD(ino, T_ULONGLONG, READONLY, "Its inode number."),
    FIELD(btime_ns, T_LONGLONG, READONLY, "Its birth time; 0: unknown."),
    FIELD(nlookup, T_ULONGLONG, 0, "References that the kernel holds."),
    FIELD(n_open, T_UINT, 0, "Open handles."),
    FIELD(is_directory, T_BOOL, READONLY, "Whether it is a directory."),
    FIELD(was_sent, T_BOOL, 0, "Whether the kernel was sent its attributes since their last invalidation."),
    FIELD(has_long_timeout, T_BOOL, 0, "Whether the kernel was sent attributes of this directory with a long timeout."),
    FIELD(is_case_sensitive, T_BOOL, 0, "Whether letter case matters in this directory, unless unknown."),
    FIELD(cached_until_s, T_DOUBLE, 0, "Until when the kernel may cache its name and attributes; 0: unknown, or not."),
    FIELD(changed_s, T_DOUBLE, 0, "When a name in it was changed; 0: never."),
    {"is_unsteady", (getter)get_is_unsteady, NULL, "Whether the kernel may write to it: its attributes are unknown.",
     NULL},
    {"is_passed", (getter)get_is_passed, NULL, "Whether the kernel may read or write it: attributes are not cached.",
     NULL},
    {"source", (getter)get_source, NULL, "Its SourceKey, which identifies the incarnation.", NULL},
    {"parent", (getter)get_parent, NULL, "The directory of its newest known name; None: it has no name.", NULL},
    {"name", (getter)get_name, NULL, "Its name there.", NULL},
    {"final_stat", (getter)get_final_stat, NULL,
     "Its attributes when its last link was removed while it was not open; else None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot node_slots[] = {
    {Py_tp_doc, "One incarnation of one inode."},
    {Py_tp_dealloc, node_free},
    {Py_tp_getset, node_getset},
    {0, NULL},
};
PyType_Spec node_spec = TYPE("Node", NodeObject, false, node_slots);

/* Fds: a Python CountedFd is an int that holds a reference. The reference ends with the object, or with the thread's
 * operation, since an exception may keep the object for longer. Everything here needs the interpreter's lock. */

typedef struct FdUse {
    PyObject_HEAD
    Fd *fd; /* one reference; NULL: dropped */
    struct FdUse *next, **at; /* in the list of its operation; NULL: made outside of one */
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

/* Drop the references to fds of this thread's operation, which has ended. */
void end_uses(void) {
    while (uses != NULL)
        fd_use_end(uses);
}

static void fd_use_free(FdUse *self) {
    fd_use_end(self);
    if (!holds_tables && has_fds_to_close()) {
        PyThreadState *released = PyEval_SaveThread();
        close_fds();
        PyEval_RestoreThread(released);
    }
    free_object(self);
}

/* Return a CountedFd, which takes over the caller's reference; None for NULL. */
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
PyType_Spec fd_use_spec = TYPE("FdUse", FdUse, false, fd_use_slots);

static PyObject *import_attribute(const char *module, const char *name) {
    PyObject *found = PyImport_ImportModule(module),
             *value = found == NULL ? NULL : PyObject_GetAttrString(found, name);
    Py_XDECREF(found);
    return value;
}

/* Import Python types that the conversions return. Returns 0, or -1 and sets an exception. */
int import_types(void) {
    attributes_type = import_attribute("fusefs.core.metadata_cache", "Attributes");
    fd_type = attributes_type == NULL ? NULL : import_attribute("fusefs.linux.fd", "CountedFd");
    return fd_type == NULL ? -1 : 0;
}
