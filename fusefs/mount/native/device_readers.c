/* /dev/fuse: reads requests, and serves those that need no Python. */
#include "core.h"

#include <poll.h>
#include <sched.h>

enum { OPEN = 14, OPENDIR = 27, CREATE = 35, TMPFILE = 51 };
enum {
    REQUEST_BYTES = (1 << 20) + (1 << 12), /* the largest write that INIT allows, and its header: the kernel refuses a
                                              smaller buffer */
    REPLY_BYTES = HEAD_BYTES_OUT + BODY_BYTES_MAX,
    N_REQUESTS_PER_CALL = 50, /* requests that are served while Python waits to do something */
};
enum {
    BUSY_WAIT_NS = 30000,    /* about the time that it takes to sleep and be woken */
    SHORT_SLEEP_NS = 100000, /* a wait so short consists mostly of sleeping and waking */
    N_SKIPS_MAX = 64,
};

/* The state of one reader thread. */
typedef struct {
    PyObject_HEAD
    Worker worker;
    uint64_t began_ns; /* start of its request, which it or Python serves; 0: none */
    bool is_held_up;   /* that request has taken long, so another thread reads the next ones */
    char *request, *reply_buffer;
    int wake_fd;          /* ends the thread's wait for a request */
    int rest_ms;          /* how long requests may wait */
    /* Whether busy waiting pays: if client and daemon share the only CPU, it keeps the client from sending a
     * request. */
    bool may_busy_wait;
    int n_to_skip, n_skips_next;
    uint64_t busy_wait_until_ns, asleep_since_ns; /* asleep_since_ns: 0: it is not asleep */
} CoreDevice;

/* Busy waiting pays only while a client sends one request after another. After each one without a request, it is
 * skipped twice as often, until a request arrives soon after the thread began to sleep. */

static bool is_busy_waiting(CoreDevice *device) {
    if (!device->busy_wait_until_ns) {
        bool is_skipped = !device->may_busy_wait || device->n_to_skip;
        if (device->n_to_skip)
            device->n_to_skip--;
        if (is_skipped)
            return false;
        device->busy_wait_until_ns = now_ns() + BUSY_WAIT_NS;
        return true;
    }
    if (now_ns() < device->busy_wait_until_ns)
        return true;
    device->busy_wait_until_ns = 0;
    device->n_to_skip = device->n_skips_next;
    if (device->n_skips_next < N_SKIPS_MAX)
        device->n_skips_next *= 2;
    return false;
}

static void note_request(CoreDevice *device) {
    if (device->busy_wait_until_ns)
        device->n_skips_next = 1;
    else if (device->asleep_since_ns && now_ns() - device->asleep_since_ns < SHORT_SLEEP_NS)
        device->n_to_skip = 0, device->n_skips_next = 1;
    device->busy_wait_until_ns = device->asleep_since_ns = 0;
}

/* Wait for a request, or for the end of the connection. Returns whether Python has something to do. */
static bool sleep_until_request(CoreDevice *device) {
    struct pollfd fds[2] = {{.fd = device->wake_fd, .events = POLLIN},
                            {.fd = device->worker.core->device, .events = POLLIN}};
    uint64_t n_wakes;
    if (!device->asleep_since_ns)
        device->asleep_since_ns = now_ns();
    bool is_woken = poll(fds, 2, -1) > 0 && fds[0].revents;
    if (!is_woken && device->rest_ms) /* even a sleep of 0 takes as long as the timer slack, 50 µs */
        is_woken = poll(fds, 1, device->rest_ms) > 0;
    return is_woken && read(device->wake_fd, &n_wakes, sizeof n_wakes) > 0;
}

/* Note that a request begins: the watch thread has to check whether it takes long. */
static void note_request_begin(CoreDevice *device) {
    Core *core = device->worker.core;
    __atomic_store_n(&device->began_ns, now_ns(), __ATOMIC_SEQ_CST); /* before `watch_sleeps` is read */
    if (__atomic_load_n(&core->watch_sleeps, __ATOMIC_SEQ_CST) &&
        __atomic_exchange_n(&core->watch_sleeps, false, __ATOMIC_SEQ_CST)) {
        uint64_t one = 1;
        if (write(core->watch_wake_fd, &one, sizeof one) < 0) { /* the watch is awake */
        }
    }
}

static void note_request_end(CoreDevice *device) { __atomic_store_n(&device->began_ns, 0, __ATOMIC_RELAXED); }

static PyObject *reply_to_device(const Worker *worker, const RawRequest *Py_UNUSED(incoming)) {
    return PyObject_GetAttrString(worker->core->requests, "write");
}

/* Write the reply to a request that the core has served. Called without the interpreter's lock. */
static void write_reply(CoreDevice *device, const char *head, int result) {
    Worker *worker = &device->worker;
    uint64_t unique, handle = 0;
    uint32_t opcode;
    memcpy(&opcode, head + 4, sizeof opcode);
    memcpy(&unique, head + 8, sizeof unique);
    put_head(device->reply_buffer, unique, result);
    if (write(worker->core->device, device->reply_buffer, HEAD_BYTES_OUT + (result > 0 ? (size_t)result : 0)) >= 0)
        return;
    int error = errno;
    bool has_handle = opcode == OPEN || opcode == OPENDIR || opcode == CREATE || opcode == TMPFILE;
    if (result >= 0 && has_handle) /* in fuse_open_out, which follows a fuse_entry_out if a node was made */
        memcpy(&handle, device->reply_buffer + HEAD_BYTES_OUT + (opcode == OPEN || opcode == OPENDIR ? 0 : ENTRY_BYTES),
               sizeof handle);
    PyEval_RestoreThread(worker->released);
    PyObject *nothing = PyObject_CallMethod(worker->core->requests, "lose_answer", "iK", error,
                                            (unsigned long long)handle);
    if (nothing == NULL)
        clear_exception(worker->core);
    Py_XDECREF(nothing);
    worker->released = PyEval_SaveThread();
}

/* Serve the request that was read. Returns false if Python may have something to do. */
static bool serve_read_request(CoreDevice *device, size_t size) {
    Worker *worker = &device->worker;
    const char *head = device->request;
    uint32_t opcode = 0, n_own = 0, header_size = 0;
    RawRequest raw_request = {.head = head, .op_in = head + HEAD_BYTES_IN, .payload = head, .size = (uint32_t)size};
    int result = NOT_OURS;
    if (size >= HEAD_BYTES_IN) {
        memcpy(&header_size, head, sizeof header_size);
        memcpy(&opcode, head + 4, sizeof opcode);
    }
    if (header_size == size && has_operation(worker->core, opcode, &n_own) && size >= (size_t)HEAD_BYTES_IN + n_own) {
        raw_request.payload = raw_request.op_in + n_own, raw_request.n_payload = (uint32_t)size - HEAD_BYTES_IN - n_own;
        raw_request.reply_body = device->reply_buffer + HEAD_BYTES_OUT;
        result = serve_raw_request(worker, &raw_request);
    }
    if (result == NOT_OURS)
        pass_to_python(worker, &raw_request);
    else if (result > NO_REPLY)
        write_reply(device, head, result);
    close_fds(); /* no client waits for that */
    return result >= NO_REPLY;
}

PyDoc_STRVAR(read_doc, "Read requests, and serve them or pass them to Python.\n\n"
                       "waits    wait for requests until Python has something to do; else return after some requests\n"
                       "Returns  whether no request is waiting\n"
                       "Raises   OSError: the connection has ended");

static PyObject *core_device_read(CoreDevice *device, PyObject *args) {
    int waits, n_remaining = N_REQUESTS_PER_CALL, error = 0;
    if (!PyArg_ParseTuple(args, "p", &waits))
        return NULL;
    Worker *worker = &device->worker;
    bool goes_on = true, is_woken = false;
    ssize_t n = 0;
    worker->released = PyEval_SaveThread();
    while (goes_on) {
        while ((n = read(worker->core->device, device->request, REQUEST_BYTES)) < 0) {
            error = errno;
            if (error == EAGAIN && waits && !is_woken)
                is_woken = !is_busy_waiting(device) && sleep_until_request(device);
            else if (error != EINTR && error != ENOENT) /* ENOENT: the client was killed meanwhile */
                break;
        }
        note_request(device);
        if (n < 0)
            break;
        note_request_begin(device);
        goes_on = serve_read_request(device, (size_t)n) && ((waits && !is_woken) || --n_remaining) &&
                  !__atomic_load_n(&device->is_held_up, __ATOMIC_RELAXED);
        note_request_end(device);
    }
    PyEval_RestoreThread(worker->released);
    if (n < 0 && error != EAGAIN) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(n < 0);
}

static PyObject *core_device_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *core;
    cpu_set_t processors;
    int wake_fd, rest_ms;
    if (!PyArg_ParseTuple(args, "Oii", &core, &wake_fd, &rest_ms))
        return NULL;
    CoreDevice *self = (CoreDevice *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->worker = (Worker){
        .core = (Core *)Py_NewRef(core), .patience = NO_WAITING, .make_reply_callable = reply_to_device};
    self->wake_fd = wake_fd;
    self->rest_ms = rest_ms;
    self->n_skips_next = 1;
    self->may_busy_wait = !rest_ms && !sched_getaffinity(0, sizeof processors, &processors) &&
                          CPU_COUNT(&processors) > 1;
    self->request = PyMem_Malloc(REQUEST_BYTES + REPLY_BYTES); /* pages that are never touched take no memory */
    if (self->request == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->reply_buffer = self->request + REQUEST_BYTES;
    return (PyObject *)self;
}

static void core_device_free(CoreDevice *self) {
    Py_XDECREF((PyObject *)self->worker.core);
    PyMem_Free(self->request);
    free_object(self);
}

static PyObject *core_device_pass_to_workers(CoreDevice *device, PyObject *Py_UNUSED(nothing)) {
    device->worker.patience = NO_CALLS;
    Py_RETURN_NONE;
}

static PyMethodDef core_device_methods[] = {
    {"read", (PyCFunction)core_device_read, METH_VARARGS, read_doc},
    {"pass_to_workers", (PyCFunction)core_device_pass_to_workers, METH_NOARGS,
     "From now on the workers serve all requests that it reads."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef core_device_members[] = {
    {"began_ns", T_ULONGLONG, offsetof(CoreDevice, began_ns), READONLY, "When its request began; 0: it serves none."},
    {"is_held_up", T_BOOL, offsetof(CoreDevice, is_held_up), 0, "Whether it has served that request for long."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot core_device_slots[] = {
    {Py_tp_doc, "A thread's reader of /dev/fuse, for requests that a core serves."},
    {Py_tp_new, core_device_new},
    {Py_tp_dealloc, core_device_free},
    {Py_tp_methods, core_device_methods},
    {Py_tp_members, core_device_members},
    {0, NULL},
};
PyType_Spec core_device_spec = TYPE("CoreDevice", CoreDevice, true, core_device_slots);
