/* A request that has come, whichever way: the operation that answers it, if it is ours. */
#include "core.h"

enum { NAMES_BYTES = 8192 }; /* that any transport has room for; names are shorter */

struct head { /* fuse_in_header */
    uint32_t size, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, more;
};

enum { GETXATTR = 22 };

typedef struct {
    Operation act;
    uint32_t n_own;   /* bytes of its own part */
    uint32_t n_names; /* that follow */
} Handler;

static const Handler handlers[] = {
    [1] = {do_lookup, 0, 1},     [2] = {do_forget, 8, 0},
    [3] = {do_getattr, 16, 0},  [4] = {do_setattr, 88, 0}, [9] = {do_mkdir, 8, 1},
    [10] = {do_unlink, 0, 1},     [11] = {do_rmdir, 0, 1},    [12] = {do_rename, 8, 2},
    [14] = {do_open, 8, 0},      [18] = {do_release, 24, 0}, [22] = {do_getxattr, 8, 1},
    [23] = {do_listxattr, 8, 0},
    [35] = {do_create, 16, 1},    [42] = {do_batch_forget, 8, 0},
    [44] = {do_readdirplus, 40, 0},
    [45] = {do_rename2, 16, 2},
};
enum { N_HANDLERS = sizeof handlers / sizeof *handlers };

/* Whether that is no name of an entry of a directory: the kernel sends none such. */
static bool leads_elsewhere(const char *name) { return !strcmp(name, ".") || !strcmp(name, "..") || strchr(name, '/'); }

/* Whether a payload is so many names, each ended by a NUL, and none of them empty. */
static bool are_names(const char *payload, uint32_t n_payload, uint32_t n_names, bool are_of_entries) {
    uint32_t begin = 0, n = 0;
    for (uint32_t at = 0; at < n_payload; at++)
        if (!payload[at]) {
            if (at == begin || (are_of_entries && leads_elsewhere(payload + begin)))
                return false;
            begin = at + 1;
            n++;
        }
    return n == n_names && begin == n_payload;
}

/* An operation has ended, as Counters.count. Threads of the core may do so at once. */
static void count(Core *core, uint32_t opcode, uint64_t took_ns, bool has_failed) {
    uint64_t *cell = core->cell + core->cell_of[opcode];
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

/* Put the head of an answer. result: how many bytes follow, or a negative errno */
void put_head(char *to, uint64_t unique, int result) {
    int32_t error = result < 0 ? result : 0;
    uint32_t size = HEAD_BYTES_OUT + (result > 0 ? (uint32_t)result : 0);
    memcpy(to, &size, sizeof size);
    memcpy(to + 4, &error, sizeof error);
    memcpy(to + 8, &unique, sizeof unique);
}

/* What Python hears of, with the interpreter's lock. */

/* The errno of the exception that is set, which is none any more. */
int failed(Core *core) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *number = PyObject_CallFunctionObjArgs(core->fails, error, core->asked, NULL);
    long value = number == NULL ? EIO : PyLong_AsLong(number);
    Py_XDECREF(number);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Clear();
    return (int)value;
}

/* A call of Python's, made for what it does: an error is in the log. */
static void done(Core *core, PyObject *nothing) {
    if (nothing == NULL)
        failed(core);
    Py_XDECREF(nothing);
}

/* Have what is made replied to in the end by its steps. Returns 0 or an errno. */
static int reply_later(Worker *worker, const Incoming *incoming, const Request *request, uint64_t began_ns) {
    Core *core = worker->core;
    PyObject *seen = attributes_object(&request->seen), *known = NULL, *opened = Py_NewRef(Py_None), *steps = NULL;
    PyObject *reply = worker->reply_to(worker, incoming);
    Node *node = request->made;
    if (seen != NULL)
        known = PyObject_CallFunction(core->EntryParam, "KOdOO", (unsigned long long)node->nodeid, seen, core->lifetime_s,
                                      Py_None, request->is_steady ? Py_True : Py_False);
    if (request->made_fd) {
        Py_DECREF(opened);
        opened = PyObject_CallFunction(core->OpenedFile, "iiO", request->made_fd, request->made_backing_id, Py_True);
    }
    if (known != NULL && opened != NULL)
        steps = PyObject_CallFunctionObjArgs(core->numbered, known, opened, NULL);
    PyObject *nothing = NULL;
    if (steps != NULL && reply != NULL)
        nothing = PyObject_CallFunction(core->later, "OKIIKO", steps, (unsigned long long)request->unique, request->pid,
                                        request->opcode, (unsigned long long)began_ns, reply);
    int error = nothing == NULL ? failed(core) : 0;
    Py_XDECREF(seen);
    Py_XDECREF(known);
    Py_XDECREF(opened);
    Py_XDECREF(steps);
    Py_XDECREF(reply);
    Py_XDECREF(nothing);
    return error;
}

/* What Python is asked: a request as it would be read from /dev/fuse. */
static PyObject *request_object(const Incoming *incoming) {
    uint32_t n_head = incoming->size < HEAD_BYTES_IN ? incoming->size : HEAD_BYTES_IN;
    uint32_t n_own = incoming->size - n_head - incoming->n_payload;
    PyObject *request = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)incoming->size);
    if (request == NULL)
        return NULL;
    char *to = PyBytes_AsString(request);
    memcpy(to, incoming->head, n_head);
    memcpy(to + n_head, incoming->own, n_own);
    memcpy(to + n_head + n_own, incoming->payload, incoming->n_payload);
    return request;
}

/* Have Python reply to a request; without the interpreter's lock, which the worker has released. */
void ask_python(Worker *worker, const Incoming *incoming) {
    Core *core = worker->core;
    PyEval_RestoreThread(worker->released);
    PyObject *request = request_object(incoming), *nothing = NULL;
    PyObject *reply = worker->reply_to(worker, incoming);
    if (request != NULL && reply != NULL)
        nothing = PyObject_CallFunction(core->asked, "OOi", request, reply, (int)worker->patience);
    if (nothing == NULL) {
        uint64_t unique;
        int error = failed(core);
        memcpy(&unique, incoming->head + 8, sizeof unique);
        if (reply != NULL && incoming->size >= HEAD_BYTES_IN)
            nothing = PyObject_CallFunction(reply, "iK", error, (unsigned long long)unique);
        done(core, nothing == NULL ? NULL : Py_NewRef(nothing));
    }
    Py_XDECREF(request);
    Py_XDECREF(reply);
    Py_XDECREF(nothing);
    worker->released = PyEval_SaveThread();
}

static void tell_python(Request *request, int result) {
    Core *core = request->core;
    if (request->n_looks) {
        done(core, PyObject_CallFunction(core->took, "Ki", (unsigned long long)request->looks_ns, request->n_looks));
        PyObject *is_in_doubt = PyObject_GetAttrString(core->latency, "is_in_doubt");
        __atomic_store_n(&core->is_in_doubt, is_in_doubt == Py_True, __ATOMIC_RELAXED);
        Py_XDECREF(is_in_doubt);
    }
    if (request->refused)
        done(core, PyObject_CallFunction(core->refused, "Nii", object_of(request->refused_node), request->refused,
                                         request->refused_fd));
    for (int at = 0; at < request->n_unused; at++)
        done(core, PyObject_CallFunction(core->unused, "N", object_of(request->unused[at])));
    for (int at = 0; at < request->n_cached; at++)
        done(core, PyObject_CallFunction(core->forget, "NNy", object_of(request->cached[at].node),
                                         object_of(request->cached[at].directory), request->cached[at].name));
    if (result == -ESTALE)
        done(core, PyObject_CallFunction(core->told_stale, "I", request->pid));
    if (__atomic_load_n((char *)core->rests.buf, __ATOMIC_RELAXED))
        done(core, PyObject_CallMethod(core->counters, "changed", NULL));
}

static void put_uses(Request *request) {
    node_put(request->refused_node);
    node_put(request->made);
    for (int at = 0; at < request->n_unused; at++)
        node_put(request->unused[at]);
    for (int at = 0; at < request->n_cached; at++) {
        node_put(request->cached[at].node);
        node_put(request->cached[at].directory);
    }
}

/* Whether there is an operation for an opcode; and how many bytes its own part has. */
bool is_ours(const Core *core, uint32_t opcode, uint32_t *n_own) {
    bool is_it = opcode < N_HANDLERS && handlers[opcode].act != NULL && core->cell_of[opcode];
    *n_own = is_it ? handlers[opcode].n_own : 0;
    return is_it;
}

/* Answer what has come; without the interpreter's lock, which the worker has released. Returns how many bytes the body of
 * the reply has; a negative errno; NOT_OURS: Python has to reply; LATER: Python does in the end; NO_ANSWER: none. */
int answer(Worker *worker, const Incoming *incoming) {
    Core *core = worker->core;
    struct head head;
    uint32_t n_own;
    memcpy(&head, incoming->head, sizeof head);
    if (!is_ours(core, head.opcode, &n_own))
        return NOT_OURS;
    const Handler *handler = &handlers[head.opcode];
    if (head.size < sizeof head + n_own + incoming->n_payload ||
        (handler->n_names && (incoming->n_payload > NAMES_BYTES ||
                              !are_names(incoming->payload, incoming->n_payload, handler->n_names, head.opcode != GETXATTR))))
        return NOT_OURS;
    Request request = {
        .worker = worker, .core = core, .opcode = head.opcode, .uid = head.uid, .gid = head.gid, .pid = head.pid,
        .unique = head.unique, .nodeid = head.nodeid, .own = incoming->own, .payload = incoming->payload,
        .n_payload = incoming->n_payload, .answer = incoming->answer,
    };
    uint64_t began_ns = now_ns();
    tables_lock(core->mutex);
    request.n_changes_before = core->tables->n_changes;
    int result = is_at_rest(&request) ? handler->act(&request) : NOT_OURS;
    if (request.made != NULL && request.made->backing != NULL)
        request.made_backing_id = request.made->backing->backing_id;
    tables_unlock(core->mutex);
    if (result > NOT_OURS && result != LATER)
        count(core, head.opcode, now_ns() - began_ns, result < 0 && result != NO_ANSWER);
    if (request.n_looks || request.refused || request.n_unused || request.n_cached || request.made != NULL ||
        result == -ESTALE || __atomic_load_n((char *)core->rests.buf, __ATOMIC_RELAXED)) {
        PyEval_RestoreThread(worker->released);
        tell_python(&request, result);
        if (result == LATER) {
            int error = reply_later(worker, incoming, &request, began_ns);
            result = error ? -error : LATER;
        }
        put_uses(&request);
        worker->released = PyEval_SaveThread();
    }
    return result;
}
