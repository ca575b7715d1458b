/* /dev/fuse: requests are read and answered without Python, as long as they are ours. */
#include "core.h"

#include <poll.h>
#include <sched.h>

enum { OPEN = 14, OPENDIR = 27, CREATE = 35, TMPFILE = 51 };
enum { ANSWER_BYTES = HEAD_BYTES_OUT + BODY_BYTES_MAX };
enum {
    AWAKE_NS = 30000, /* to go to sleep and to be woken takes about that */
    SOON_NS = 100000, /* of which sleeping and waking take most */
    N_LEFT_OUT_MAX = 64,
};

/* One thread's. */
typedef struct {
    Worker worker;
    PyObject *lost; /* called for an answer that the kernel has not taken: with an errno and a handle or 0 */
    Py_buffer memory; /* of requests */
    char *answer;
    int wake_fd; /* ends its wait for a request */
    unsigned int rest_ms; /* for which what has come may wait */
    bool pays;   /* to wait awake: where client and daemon share a processor, it keeps the client from asking */
    int n_to_leave_out, n_left_out_next;
    uint64_t awake_until_ns, asleep_since_ns; /* 0: it is not */
} CoreDevice;

/* Waiting awake pays while a client asks one thing after another, and for nothing else: each time that nothing has
 * come, it is left out twice as often, until a request comes soon after going to sleep. */

static bool is_awake(CoreDevice *device) {
    if (!device->awake_until_ns) {
        bool is_left_out = !device->pays || device->n_to_leave_out;
        if (device->n_to_leave_out)
            device->n_to_leave_out--;
        if (is_left_out)
            return false;
        device->awake_until_ns = now_ns() + AWAKE_NS;
        return true;
    }
    if (now_ns() < device->awake_until_ns)
        return true;
    device->awake_until_ns = 0;
    device->n_to_leave_out = device->n_left_out_next;
    if (device->n_left_out_next < N_LEFT_OUT_MAX)
        device->n_left_out_next *= 2;
    return false;
}

static void has_come(CoreDevice *device) {
    if (device->awake_until_ns)
        device->n_left_out_next = 1;
    else if (device->asleep_since_ns && now_ns() - device->asleep_since_ns < SOON_NS)
        device->n_to_leave_out = 0, device->n_left_out_next = 1;
    device->awake_until_ns = device->asleep_since_ns = 0;
}

/* Sleep until there is a request, or the connection is gone. Returns false: it is to look at what Python has for it. */
static bool sleep_until_come(CoreDevice *device) {
    struct pollfd fds[2] = {{.fd = device->worker.core->device, .events = POLLIN},
                            {.fd = device->wake_fd, .events = POLLIN}};
    if (!device->asleep_since_ns)
        device->asleep_since_ns = now_ns();
    if (poll(fds, 2, -1) >= 0 && fds[1].revents)
        return false;
    if (device->rest_ms) /* even a sleep of 0 takes as long as the timer's slack, 50 µs */
        usleep(device->rest_ms * 1000);
    return true;
}

/* Write the reply to a request that was ours; without the interpreter's lock. */
static void write_answer(CoreDevice *device, const char *head, int result) {
    Worker *worker = &device->worker;
    uint64_t unique, handle = 0;
    uint32_t opcode;
    memcpy(&opcode, head + 4, sizeof opcode);
    memcpy(&unique, head + 8, sizeof unique);
    put_head(device->answer, unique, result);
    if (write(worker->core->device, device->answer, HEAD_BYTES_OUT + (result > 0 ? (size_t)result : 0)) >= 0)
        return;
    int error = errno;
    bool has_handle = opcode == OPEN || opcode == OPENDIR || opcode == CREATE || opcode == TMPFILE;
    if (result >= 0 && has_handle) /* fuse_open_out; behind a fuse_entry_out */
        memcpy(&handle, device->answer + HEAD_BYTES_OUT + (opcode == OPEN || opcode == OPENDIR ? 0 : ENTRY_BYTES),
               sizeof handle);
    PyEval_RestoreThread(worker->released);
    PyObject *nothing = PyObject_CallFunction(device->lost, "iK", error, (unsigned long long)handle);
    if (nothing == NULL)
        failed(worker->core);
    Py_XDECREF(nothing);
    worker->released = PyEval_SaveThread();
}

/* Answer the request that was read. Returns 1: it is; 2: Python goes on with its steps; 0: Python has to. */
static int answer_read(CoreDevice *device, size_t size) {
    const char *head = device->memory.buf;
    uint32_t opcode, n_own, n_said;
    memcpy(&n_said, head, sizeof n_said);
    memcpy(&opcode, head + 4, sizeof opcode);
    if (!is_ours(device->worker.core, opcode, &n_own) || n_said != size || size < (size_t)HEAD_BYTES_IN + n_own)
        return 0;
    Incoming incoming = {
        .head = head, .own = head + HEAD_BYTES_IN, .payload = head + HEAD_BYTES_IN + n_own,
        .n_payload = (uint32_t)size - HEAD_BYTES_IN - n_own, .answer = device->answer + HEAD_BYTES_OUT,
    };
    int result = answer(&device->worker, &incoming);
    if (result > NO_ANSWER)
        write_answer(device, head, result);
    close_fds(); /* no client waits for that */
    return result == NOT_OURS ? 0 : result == LATER ? 2 : 1;
}

PyDoc_STRVAR(read_doc, "Read requests and answer those that are ours.\n\n"
                       "waits    for a request; else it returns as soon as there is none\n"
                       "Returns  the size of a request that is not ours, in `memory`; 0: there is none, or there may be\n"
                       "         something else to do\n"
                       "Raises   OSError: the connection is gone");

static PyObject *core_device_read(CoreDevice *device, PyObject *args) {
    int waits;
    if (!PyArg_ParseTuple(args, "p", &waits))
        return NULL;
    Worker *worker = &device->worker;
    const Core *core = worker->core;
    ssize_t n = 0;
    int error = 0, is_answered = 1;
    work_ends(worker);
    worker->released = PyEval_SaveThread();
    while (is_answered == 1 && !__atomic_load_n(&worker->is_held_up, __ATOMIC_RELAXED)) {
        bool goes_on = true;
        while ((n = read(core->device, device->memory.buf, (size_t)device->memory.len)) < 0 && goes_on) {
            error = errno;
            if (error == EAGAIN)
                goes_on = waits && (is_awake(device) || sleep_until_come(device));
            else
                goes_on = error == EINTR || error == ENOENT; /* ENOENT: its client was killed meanwhile */
        }
        has_come(device);
        if (n < 0)
            break;
        work_begins(worker);
        is_answered = answer_read(device, (size_t)n);
        if (is_answered)
            work_ends(worker);
    }
    PyEval_RestoreThread(worker->released);
    if (n < 0 && error != EAGAIN) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromSsize_t(n < 0 || is_answered ? 0 : n);
}

static PyObject *core_device_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *core, *later, *lost, *memory;
    cpu_set_t processors;
    int wake_fd;
    unsigned int rest_ms;
    if (!PyArg_ParseTuple(args, "OOOOiI", &core, &later, &lost, &memory, &wake_fd, &rest_ms))
        return NULL;
    CoreDevice *self = (CoreDevice *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->lost = Py_NewRef(lost);
    self->wake_fd = wake_fd;
    self->rest_ms = rest_ms;
    self->n_left_out_next = 1;
    self->pays = !rest_ms && !sched_getaffinity(0, sizeof processors, &processors) && CPU_COUNT(&processors) > 1;
    self->answer = PyMem_Malloc(ANSWER_BYTES); /* what no answer has taken is not in memory */
    if (self->answer == NULL)
        PyErr_NoMemory();
    worker_begin(&self->worker, core, later);
    if (self->answer == NULL || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void core_device_free(CoreDevice *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    worker_end(&self->worker);
    if (self->memory.buf != NULL)
        PyBuffer_Release(&self->memory);
    PyMem_Free(self->answer);
    Py_XDECREF(self->lost);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef core_device_methods[] = {
    {"read", (PyCFunction)core_device_read, METH_VARARGS, read_doc},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot core_device_slots[] = {
    {Py_tp_doc, "One thread's reading of /dev/fuse, whose requests a core answers."},
    {Py_tp_new, core_device_new},
    {Py_tp_dealloc, core_device_free},
    {Py_tp_methods, core_device_methods},
    {Py_tp_getset, worker_getset},
    {0, NULL},
};
PyType_Spec core_device_spec = {
    .name = "fusefs.mount.native._core.CoreDevice",
    .basicsize = sizeof(CoreDevice),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = core_device_slots,
};
