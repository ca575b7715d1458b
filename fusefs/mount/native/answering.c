/* A request that has come, whichever way: the operation that answers it, if it is ours. */
#include "core.h"

enum { NAMES_BYTES = 8192 }; /* that any transport has room for; names are shorter */

struct head { /* fuse_in_header */
    uint32_t size, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, more;
};

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

/* Whether a payload is so many names, each ended by a NUL, and none of them empty. */
static bool are_names(const char *payload, uint32_t n_payload, uint32_t n_names) {
    uint32_t begin = 0, n = 0;
    for (uint32_t at = 0; at < n_payload; at++)
        if (!payload[at]) {
            if (at == begin)
                return false;
            begin = at + 1;
            n++;
        }
    return n == n_names && begin == n_payload;
}

static int count(Core *core, uint32_t opcode, uint64_t took_ns, bool has_failed) {
    uint64_t *cell = core->cell + core->cell_of[opcode];
    uint64_t parts = took_ns >> core->first_bits;
    int bucket = parts ? 64 - __builtin_clzll(parts) : 0;
    cell[core->n_first_bucket + (bucket < core->n_buckets ? bucket : core->n_buckets - 1)]++;
    cell[core->n_total] += took_ns;
    if (took_ns > cell[core->n_max])
        cell[core->n_max] = took_ns;
    if (has_failed)
        cell[core->n_failed]++;
    if (!is_true(core->counters, names._rests))
        return 0;
    PyObject *nothing = PyObject_CallMethodObjArgs(core->counters, names.changed, NULL);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* Put the head of an answer. result: how many bytes follow, or a negative errno */
void put_head(char *to, uint64_t unique, int result) {
    int32_t error = result < 0 ? result : 0;
    uint32_t size = HEAD_BYTES_OUT + (result > 0 ? (uint32_t)result : 0);
    memcpy(to, &size, sizeof size);
    memcpy(to + 4, &error, sizeof error);
    memcpy(to + 8, &unique, sizeof unique);
}

/* Have what is done answered in the end by its steps, which take turns. */
static int tell_later(Worker *worker, uint64_t token, const Request *request, uint64_t began_ns) {
    tables_end(worker);
    if (PyObject_SetAttr(worker->turn, names.shared_by, Py_None) < 0)
        return -1;
    PyObject *nothing =
        PyObject_CallFunction(worker->later, "KOKIIK", (unsigned long long)token, request->steps,
                              (unsigned long long)request->unique, request->pid, request->opcode,
                              (unsigned long long)began_ns);
    Py_XDECREF(nothing);
    PyThreadState *released = PyEval_SaveThread();
    tables_begin(worker);
    PyEval_RestoreThread(released);
    return nothing == NULL ? -1 : PyObject_SetAttr(worker->turn, names.shared_by, worker->core->turns);
}

/* Whether there is an operation for an opcode; and how many bytes its own part has. */
bool is_ours(const Core *core, uint32_t opcode, uint32_t *n_own) {
    bool is_it = opcode < N_HANDLERS && handlers[opcode].act != NULL && core->cell_of[opcode];
    *n_own = is_it ? handlers[opcode].n_own : 0;
    return is_it;
}

/* Answer what has come. Returns how many bytes its body has; a negative errno; NOT_OURS: Python has to; LATER: Python
 * does in the end; NO_ANSWER: there is none to give; RAISED: an exception. */
int answer(Worker *worker, const Incoming *incoming) {
    Core *core = worker->core;
    struct head head;
    uint32_t n_own;
    memcpy(&head, incoming->head, sizeof head);
    if (!is_ours(core, head.opcode, &n_own))
        return NOT_OURS;
    const Handler *handler = &handlers[head.opcode];
    Request request = {
        .worker = worker, .core = core, .opcode = head.opcode, .uid = head.uid, .gid = head.gid, .pid = head.pid,
        .unique = head.unique, .nodeid = head.nodeid, .own = incoming->own, .payload = incoming->payload,
        .n_payload = incoming->n_payload, .answer = incoming->answer,
    };
    if (head.size < sizeof head + n_own + request.n_payload ||
        (handler->n_names &&
         (request.n_payload > NAMES_BYTES || !are_names(request.payload, request.n_payload, handler->n_names))))
        return NOT_OURS;
    uint64_t began_ns = now_ns();
    if (turn_begin(&request) < 0)
        return RAISED;
    int result = is_at_rest(&request) && !is_true(worker->turn, names.hands_out) ? handler->act(&request) : NOT_OURS;
    if (result == RAISED)
        result = -failed(core);
    if (result > NOT_OURS && result != LATER) {
        if (result == -ESTALE) {
            PyObject *nothing = PyObject_CallFunction(core->told_stale, "I", request.pid);
            Py_XDECREF(nothing);
        }
        if (count(core, head.opcode, now_ns() - began_ns, result < 0 && result != NO_ANSWER) < 0)
            failed(core);
    }
    if (has_fds_to_close()) {
        if (calls_begin(&request) < 0)
            return RAISED;
        close_fds();
        if (calls_end(&request) < 0)
            return RAISED;
    }
    bool has_failed = result == LATER && tell_later(worker, incoming->token, &request, began_ns) < 0;
    Py_XDECREF(request.steps);
    return has_failed || PyErr_Occurred() ? RAISED : result;
}

/* A thread begins to answer. Returns 0, or -1 with an exception. */
int worker_begin(Worker *worker, PyObject *core, PyObject *turn, PyObject *later) {
    worker->core = (Core *)Py_NewRef(core);
    worker->turn = Py_NewRef(turn);
    worker->later = Py_NewRef(later);
    worker->calls = PyObject_GetAttr(turn, names.calls);
    if (worker->calls == NULL)
        return -1;
    struct worker **workers =
        PyMem_Realloc(worker->core->workers, (size_t)(worker->core->n_workers + 1) * sizeof *workers);
    if (workers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    worker->core->workers = workers;
    workers[worker->core->n_workers++] = worker;
    return 0;
}

/* It is gone. */
void worker_end(Worker *worker) {
    Core *core = worker->core;
    if (core == NULL)
        return;
    for (int at = 0; at < core->n_workers; at++)
        if (core->workers[at] == worker)
            core->workers[at] = core->workers[--core->n_workers];
    Py_XDECREF(worker->turn);
    Py_XDECREF(worker->later);
    Py_XDECREF(worker->calls);
    Py_DECREF((PyObject *)core);
}
