/* Finds the operation that serves a request, from any transport, and reports its effects to Python. */
#include "core.h"

enum { NAMES_BYTES = 8192 }; /* size of names that every transport has room for; names are shorter */
enum { N_PATIENCE = 50, PATIENCE_US = 1000 };

struct in_header { /* fuse_in_header */
    uint32_t size, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, more;
};

typedef struct {
    Operation *operation;
    uint32_t n_own;    /* size of its own struct */
    uint32_t n_strings, n_names; /* strings that follow it; the first `n_names` of them are names of entries */
    bool never_waits;  /* served at once even if the backing filesystem is slow */
    bool is_long; /* takes long on any filesystem */
} Handler;

static const Handler handlers[] = {
    [1] = {do_lookup, 0, 1, 1},
    [2] = {do_forget, 8, .never_waits = true},
    [3] = {do_getattr, 16},
    [4] = {do_setattr, 88},
    [5] = {do_readlink, 0},
    [6] = {do_symlink, 0, 2, 1},
    [8] = {do_mknod, 16, 1, 1},
    [9] = {do_mkdir, 8, 1, 1},
    [10] = {do_unlink, 0, 1, 1},
    [11] = {do_rmdir, 0, 1, 1},
    [12] = {do_rename, 8, 2, 2},
    [13] = {do_link, 8, 1, 1},
    [14] = {do_open, 8},
    [15] = {do_read, 20},
    [16] = {do_write, 40},
    [17] = {do_statfs, 0},
    [18] = {do_release, 8},
    [20] = {do_fsync, 16, .is_long = true},
    [21] = {do_setxattr, 8},
    [22] = {do_getxattr, 8, 1},
    [23] = {do_listxattr, 8},
    [24] = {do_removexattr, 0, 1},
    [25] = {do_flush, 8},
    [27] = {do_opendir, 8},
    [29] = {do_release, 8},
    [30] = {do_fsyncdir, 16, .is_long = true},
    [34] = {do_access, 8},
    [35] = {do_create, 16, 1, 1},
    [42] = {do_batch_forget, 8, .never_waits = true},
    [43] = {do_fallocate, 32, .is_long = true},
    [44] = {do_readdirplus, 40},
    [45] = {do_rename2, 16, 2, 2},
    [46] = {do_lseek, 20},
    [47] = {do_copy_file_range, 56, .is_long = true},
    [51] = {do_tmpfile, 16},
    [52] = {do_statx, 0},
    [53] = {do_copy_file_range_64, 56, .is_long = true},
};
enum { N_HANDLERS = sizeof handlers / sizeof *handlers };

/* Return whether a name can't be an entry of a directory: the kernel sends no such name. */
static bool is_no_entry_name(const char *name) {
    return !strcmp(name, ".") || !strcmp(name, "..") || strchr(name, '/');
}

/* Return whether a payload has the form that a handler expects: NUL-terminated strings, none of them empty. */
static bool is_well_formed(const Handler *handler, const char *payload, uint32_t n_payload) {
    uint32_t begin = 0, n = 0;
    if (!handler->n_strings)
        return true;
    for (uint32_t at = 0; at < n_payload; at++)
        if (!payload[at]) {
            if (at == begin || (n < handler->n_names && is_no_entry_name(payload + begin)))
                return false;
            begin = at + 1;
            n++;
        }
    return n == handler->n_strings && begin == n_payload && n_payload <= NAMES_BYTES;
}

/* Count a request that has ended; many threads may count at once. at: the first cell of its operation's counters */
void count(const Core *core, uint32_t at, uint64_t took_ns, bool has_failed) {
    uint64_t *cell = core->cell + at;
    uint64_t parts = took_ns >> core->first_bits;
    int bucket = parts ? 64 - __builtin_clzll(parts) : 0;
    bucket = bucket < core->n_buckets ? bucket : core->n_buckets - 1;
    __atomic_add_fetch(&cell[core->n_first_bucket + bucket], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&cell[core->n_total], took_ns, __ATOMIC_RELAXED);
    if (took_ns > __atomic_load_n(&cell[core->n_max], __ATOMIC_RELAXED))
        __atomic_store_n(&cell[core->n_max], took_ns, __ATOMIC_RELAXED);
    if (has_failed)
        __atomic_add_fetch(&cell[core->n_failed], 1, __ATOMIC_RELAXED);
}

/* Put the header of a reply. result: the size of its body, or a negative errno */
void put_head(char *to, uint64_t unique, int result) {
    int32_t error = result < 0 ? result : 0;
    uint32_t size = HEAD_BYTES_OUT + (result > 0 ? (uint32_t)result : 0);
    memcpy(to, &size, sizeof size);
    memcpy(to + 4, &error, sizeof error);
    memcpy(to + 8, &unique, sizeof unique);
}

/* Calls to Python, made with the interpreter's lock. */

/* Clear the exception that is set; return its errno. */
int clear_exception(Core *core) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *number = PyObject_CallMethod(core->calls, "errno_of", "OO", error, core);
    long value = number == NULL ? EIO : PyLong_AsLong(number);
    Py_XDECREF(number);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Clear();
    return (int)value;
}

/* Drop the result of a Python call; log an exception. */
static void finish_call(Core *core, PyObject *nothing) {
    if (nothing == NULL)
        clear_exception(core);
    Py_XDECREF(nothing);
}

/* Have Python reply when the new node has its own number. Returns 0 or an errno. */
static int reply_later(Worker *worker, const RawRequest *raw_request, const Request *request) {
    Core *core = worker->core;
    PyObject *reply = worker->make_reply_callable(worker, raw_request), *nothing = NULL;
    if (reply != NULL)
        nothing = PyObject_CallMethod(core->requests, "answer_later", "Ny#KIIKO", object_of(request->created),
                                      request->reply_body, (Py_ssize_t)request->n_created_bytes,
                                      (unsigned long long)request->unique, request->pid, request->opcode,
                                      (unsigned long long)request->began_ns, reply);
    int error = nothing == NULL ? clear_exception(core) : 0;
    Py_XDECREF(reply);
    Py_XDECREF(nothing);
    return error;
}

/* Return the request for Python, as it would be read from /dev/fuse. */
static PyObject *request_object(const RawRequest *raw_request) {
    uint32_t n_head = raw_request->size < HEAD_BYTES_IN ? raw_request->size : HEAD_BYTES_IN;
    uint32_t n_own = raw_request->size - n_head - raw_request->n_payload;
    PyObject *request = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)raw_request->size);
    if (request == NULL)
        return NULL;
    char *to = PyBytes_AsString(request);
    memcpy(to, raw_request->head, n_head);
    memcpy(to + n_head, raw_request->op_in, n_own);
    memcpy(to + n_head + n_own, raw_request->payload, raw_request->n_payload);
    return request;
}

/* Have Python reply to a request. Called without the interpreter's lock, which the worker has released. */
void pass_to_python(Worker *worker, const RawRequest *raw_request) {
    Core *core = worker->core;
    PyEval_RestoreThread(worker->released);
    PyObject *request = request_object(raw_request), *nothing = NULL;
    PyObject *reply = worker->make_reply_callable(worker, raw_request);
    if (request != NULL && reply != NULL)
        nothing = PyObject_CallMethod(core->requests, "answer", "OOi", request, reply, (int)worker->patience);
    if (nothing == NULL) {
        uint64_t unique;
        int error = clear_exception(core);
        memcpy(&unique, raw_request->head + 8, sizeof unique);
        if (reply != NULL && raw_request->size >= HEAD_BYTES_IN)
            nothing = PyObject_CallFunction(reply, "iK", error, (unsigned long long)unique);
        finish_call(core, nothing == NULL ? NULL : Py_NewRef(nothing));
    }
    Py_XDECREF(request);
    Py_XDECREF(reply);
    Py_XDECREF(nothing);
    worker->released = PyEval_SaveThread();
}

/* Return a boolean that Python returned, and drop the object; log an exception. Called with the interpreter's lock. */
static bool is_true(Core *core, PyObject *answered, bool if_failed) {
    bool is_it = answered == NULL ? if_failed : answered == Py_True;
    finish_call(core, answered);
    return is_it;
}

/* Return whether a name in a directory may have other spellings. Called without the tables lock. fd: of the
 * directory */
bool query_folding(Request *request, Node *directory, int fd) {
    PyEval_RestoreThread(*request->released);
    PyObject *answered = PyObject_CallMethod(request->core->calls, "folds", "Ni", object_of(directory), fd);
    bool folds = is_true(request->core, answered, true);
    *request->released = PyEval_SaveThread();
    return folds;
}

/* Return whether attributes on a device other than the root's may be cached. Called without the tables lock. */
bool query_device(Request *request, uint64_t dev) {
    PyEval_RestoreThread(*request->released);
    PyObject *answered = PyObject_CallMethod(request->core->calls, "meets", "K", (unsigned long long)dev);
    bool are_cacheable = is_true(request->core, answered, false);
    *request->released = PyEval_SaveThread();
    return are_cacheable;
}

static void forget_in_cache(Core *core, const CacheChange *change) {
    PyObject *source = change->has_source ? source_object(&change->source) : Py_NewRef(Py_None);
    finish_call(core, PyObject_CallMethod(core->calls, "forget", "NNyi", source, object_of(change->directory),
                                          change->name, change->has_ended));
}

/* Have Python end unused nodes. Called with the interpreter's lock. */
static void end_in_python(Request *request) {
    for (int at = 0; at < request->n_unused; at++) {
        finish_call(request->core,
                    PyObject_CallMethod(request->core->calls, "unused", "N", object_of(request->unused_nodes[at])));
        node_put(request->unused_nodes[at]);
    }
    request->n_unused = 0;
}

/* Have Python end unused nodes. Called with neither the interpreter's lock nor the tables lock. */
void report_unused(Request *request) {
    if (!request->n_unused)
        return;
    PyEval_RestoreThread(*request->released);
    end_in_python(request);
    *request->released = PyEval_SaveThread();
}

static void report_to_python(Request *request, int result) {
    Core *core = request->core;
    if (request->n_timed_stats) {
        PyObject *answered = PyObject_CallMethod(core->calls, "took", "Ki", (unsigned long long)request->timed_stats_ns,
                                                 request->n_timed_stats);
        __atomic_store_n(&core->is_in_doubt, is_true(core, answered, false), __ATOMIC_RELAXED);
    }
    if (request->refused_errno)
        finish_call(core, PyObject_CallMethod(core->calls, "refused", "Nii", object_of(request->refused_node),
                                              request->refused_errno, request->refused_fd));
    end_in_python(request);
    for (int at = 0; at < request->n_stored; at++)
        finish_call(core, PyObject_CallMethod(core->calls, "stored", "Ni", object_of(request->stored_nodes[at]),
                                              request->are_moved));
    for (const CacheChange *change = request->cache_changes; change != NULL; change = change->next)
        forget_in_cache(core, change);
    if (request->has_left_trash)
        finish_call(core, PyObject_CallMethod(core->calls, "came_back", NULL));
    if (result == -ESTALE)
        finish_call(core, PyObject_CallMethod(core->calls, "told_stale", "I", request->pid));
    if (__atomic_load_n((char *)core->rests.buf, __ATOMIC_RELAXED))
        finish_call(core, PyObject_CallMethod(core->calls, "changed", NULL));
}

static void drop_references(Request *request) {
    node_put(request->refused_node);
    node_put(request->created);
    for (int at = 0; at < request->n_stored; at++)
        node_put(request->stored_nodes[at]);
    for (CacheChange *change = request->cache_changes, *next; change != NULL; change = next) {
        next = change->next;
        node_put(change->directory);
        free(change);
    }
}

/* Return whether there is an operation for an opcode. n_own: gets the size of its own struct */
bool has_operation(const Core *core, uint32_t opcode, uint32_t *n_own) {
    bool is_it = opcode < N_HANDLERS && handlers[opcode].operation != NULL && core->cell_of[opcode];
    *n_own = is_it ? handlers[opcode].n_own : 0;
    return is_it;
}

/* Serve a request. Called without the interpreter's lock, which the worker has released. Returns the size of the
 * reply's body, a negative errno, or: NOT_OURS: Python has to reply; LATER: Python will reply; NO_REPLY: the
 * kernel expects none. */
int serve_raw_request(Worker *worker, const RawRequest *raw_request) {
    Core *core = worker->core;
    struct in_header header;
    uint32_t n_own;
    memcpy(&header, raw_request->head, sizeof header);
    if (!has_operation(core, header.opcode, &n_own))
        return NOT_OURS;
    const Handler *handler = &handlers[header.opcode];
    Patience needed = handler->never_waits ? NO_CALLS : handler->is_long ? ANY_TIME : NO_WAITING;
    if (worker->patience < needed || header.size < sizeof header + n_own + raw_request->n_payload ||
        !is_well_formed(handler, raw_request->payload, raw_request->n_payload))
        return NOT_OURS;
    Request request = {
        .core = core,
        .released = &worker->released,
        .inode_fd = -1,
        .is_timed = true,
        .began_ns = now_ns(),
        .opcode = header.opcode,
        .uid = header.uid,
        .gid = header.gid,
        .pid = header.pid,
        .unique = header.unique,
        .nodeid = header.nodeid,
        .op_in = raw_request->op_in,
        .payload = raw_request->payload,
        .n_payload = raw_request->n_payload,
        .reply_body = raw_request->reply_body,
    };
    tables_lock(core->mutex);
    request.n_changes_before = core->tables->n_changes;
    int result = handler->never_waits || may_serve_in_core(&request) ? handler->operation(&request) : NOT_OURS;
    if (result == -EAGAIN) /* the operation would wait for another process */
        result = NOT_OURS;
    tables_unlock(core->mutex);
    if (result > NOT_OURS && result != LATER)
        count(core, core->cell_of[header.opcode], now_ns() - request.began_ns, result < 0 && result != NO_REPLY);
    if (request.n_timed_stats || request.refused_errno || request.n_unused || request.n_stored ||
        request.cache_changes != NULL || request.has_left_trash || request.created != NULL || result == -ESTALE ||
        __atomic_load_n((char *)core->rests.buf, __ATOMIC_RELAXED)) {
        PyEval_RestoreThread(worker->released);
        report_to_python(&request, result);
        if (result == LATER) {
            int error = reply_later(worker, raw_request, &request);
            result = error ? -error : LATER;
        }
        drop_references(&request);
        worker->released = PyEval_SaveThread();
    }
    return result;
}

/* Wait until a new node has its own number, or won't get it soon: a deleted inode that is in use keeps its number for
 * longer than a client wants to wait. Called with the tables lock, which is released meanwhile. Returns the size of the
 * reply's body. */
static int wait_for_number(Request *request) {
    Tables *t = request->core->tables;
    for (int at = 0; at < N_PATIENCE && may_get_own_number(t, request->created); at++) {
        calls_begin(request);
        usleep(PATIENCE_US);
        calls_end(request);
        renumber(t, request->created);
    }
    put_number(request->reply_body, request->created->nodeid);
    return request->n_created_bytes;
}

/* Do a request. Called with neither the tables lock nor the interpreter's lock. Returns as `serve_raw_request` does. */
static int do_request(Request *request, const Handler *handler) {
    Core *core = request->core;
    tables_lock(core->mutex);
    request->n_changes_before = core->tables->n_changes;
    int result = handler->operation(request);
    if (result == LATER)
        result = wait_for_number(request);
    tables_unlock(core->mutex);
    close_fds();
    return result;
}

PyObject *core_do(Core *core, PyObject *args) {
    Py_buffer in;
    int held = -1, result = -EINVAL;
    struct in_header header;
    uint32_t n_own = 0;
    PyThreadState *released;
    PyObject *reply = NULL;
    if (!PyArg_ParseTuple(args, "y*|i", &in, &held))
        return NULL;
    const char *own = (const char *)in.buf + sizeof header;
    memset(&header, 0, sizeof header);
    if (in.len >= (Py_ssize_t)sizeof header)
        memcpy(&header, in.buf, sizeof header);
    bool is_one = has_operation(core, header.opcode, &n_own) && in.len >= (Py_ssize_t)(sizeof header + n_own);
    uint32_t n_payload = is_one ? (uint32_t)in.len - (uint32_t)sizeof header - n_own : 0;
    Request request = {
        .core = core,
        .released = &released,
        .inode_fd = held,
        .is_from_python = true,
        .began_ns = now_ns(),
        .is_timed = __atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED),
        .opcode = header.opcode,
        .uid = header.uid,
        .gid = header.gid,
        .pid = header.pid,
        .unique = header.unique,
        .nodeid = header.nodeid,
        .op_in = own,
        .payload = own + n_own,
        .n_payload = n_payload,
    };
    if (is_one && is_well_formed(&handlers[header.opcode], request.payload, n_payload)) {
        request.reply_body = malloc(BODY_BYTES_MAX); /* pages that are never touched take no memory */
        if (request.reply_body == NULL) {
            PyBuffer_Release(&in);
            return PyErr_NoMemory();
        }
        released = PyEval_SaveThread();
        result = do_request(&request, &handlers[header.opcode]);
        PyEval_RestoreThread(released);
        report_to_python(&request, 0);
        drop_references(&request);
    }
    if (result < 0 && result != NO_REPLY) {
        errno = result == NOT_OURS ? ENOSYS : -result;
        PyErr_SetFromErrno(PyExc_OSError);
    } else
        reply = PyBytes_FromStringAndSize(request.reply_body, result == NO_REPLY ? 0 : result);
    free(request.reply_body);
    PyBuffer_Release(&in);
    return reply;
}
