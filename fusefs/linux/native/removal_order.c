/* Lists the first entries of a directory with getdents64, in the reverse order of their removal. */
#include "bulk.h"

enum { BUNDLE = 4096 };

struct found {
    uint64_t ino;
    uint32_t at;
    uint8_t length;
    uint8_t is_dir;
};

struct window {
    struct found *found;
    size_t n, n_room;
    char *text; /* all names, one after another */
    size_t n_text, n_text_room;
    size_t most, most_text;
    bool is_all;
    int error;
};

enum { DIRECTORY = 4 }; /* DT_DIR */

static bool has_room(struct window *window) {
    if (window->n == window->n_room) {
        size_t n_room = 2 * window->n_room + 1024;
        struct found *more = realloc(window->found, n_room * sizeof *more);
        if (more == NULL)
            return false;
        window->found = more;
        window->n_room = n_room;
    }
    if (window->n_text + 256 > window->n_text_room) {
        size_t n_room = 2 * window->n_text_room + 16384;
        char *more = realloc(window->text, n_room);
        if (more == NULL)
            return false;
        window->text = more;
        window->n_text_room = n_room;
    }
    return true;
}

/* Add entries to the window. Returns whether to continue reading. */
static bool take(struct window *window, const char *entries, long size) {
    for (long at = 0; at < size;) {
        const struct entry *entry = (const struct entry *)(entries + at);
        at += entry->length;
        if (is_dots(entry->name))
            continue;
        size_t length = strlen(entry->name);
        if (window->n >= window->most || window->n_text >= window->most_text)
            return window->is_all = false;
        if (length > UINT8_MAX || !has_room(window)) {
            window->error = length > UINT8_MAX ? ENAMETOOLONG : ENOMEM;
            return false;
        }
        window->found[window->n++] =
            (struct found){entry->ino, (uint32_t)window->n_text, (uint8_t)length, entry->kind == DIRECTORY};
        memcpy(window->text + window->n_text, entry->name, length);
        window->n_text += length;
    }
    return true;
}

static int last_first(const void *one, const void *other) {
    uint64_t a = ((const struct found *)one)->ino, b = ((const struct found *)other)->ino;
    return a < b ? 1 : a > b ? -1 : 0;
}

static void read_all(int fd, struct window *window) {
    static _Thread_local char entries[ROOM] __attribute__((aligned(8)));
    window->is_all = true;
    long size = lseek(fd, 0, SEEK_SET);
    while (size >= 0) {
        size = syscall(SYS_getdents64, fd, entries, sizeof entries);
        if (size == 0 || (size > 0 && !take(window, entries, size)))
            return;
        if (size < 0 && errno == EINTR)
            size = 0;
    }
    window->error = errno;
}

static void in_order(struct window *window, bool by_inode) {
    if (by_inode) {
        qsort(window->found, window->n, sizeof *window->found, last_first);
        return;
    }
    for (size_t at = 0; at < window->n / 2; at++) {
        struct found first = window->found[at];
        window->found[at] = window->found[window->n - 1 - at];
        window->found[window->n - 1 - at] = first;
    }
}

/* Put directories into one list and bundles of other names, assembled in `text`, into the other. Returns 0, or -1 after
 * an exception. */
static int divide(const struct window *window, char *text, PyObject *bundles, PyObject *subdirs) {
    size_t n_text = 0, n = 0;
    for (size_t at = 0; at < window->n; at++) {
        const struct found *found = &window->found[at];
        const char *name = window->text + found->at;
        if (found->is_dir) {
            if (append(subdirs, PyUnicode_DecodeFSDefaultAndSize(name, found->length)) < 0)
                return -1;
            continue;
        }
        if (n == BUNDLE) {
            if (append(bundles, PyBytes_FromStringAndSize(text, (Py_ssize_t)n_text)) < 0)
                return -1;
            n_text = n = 0;
        }
        if (n++)
            text[n_text++] = '/';
        memcpy(text + n_text, name, found->length);
        n_text += found->length;
    }
    return n ? append(bundles, PyBytes_FromStringAndSize(text, (Py_ssize_t)n_text)) : 0;
}

PyObject *bulk_window(PyObject *module, PyObject *args) {
    (void)module;
    int fd, by_inode;
    Py_ssize_t most, most_text;
    if (!PyArg_ParseTuple(args, "innp", &fd, &most, &most_text, &by_inode))
        return NULL;
    struct window window = {.most = (size_t)most, .most_text = (size_t)most_text};
    Py_BEGIN_ALLOW_THREADS
    read_all(fd, &window);
    in_order(&window, by_inode);
    Py_END_ALLOW_THREADS
    char *text = malloc(BUNDLE * (UINT8_MAX + 1));
    if (text == NULL)
        window.error = ENOMEM;
    PyObject *bundles = PyList_New(0), *subdirs = PyList_New(0), *result = NULL;
    if (window.error) {
        errno = window.error;
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (bundles != NULL && subdirs != NULL && divide(&window, text, bundles, subdirs) == 0) {
        result = Py_BuildValue("OOO", bundles, subdirs, window.is_all ? Py_True : Py_False);
    }
    Py_XDECREF(bundles);
    Py_XDECREF(subdirs);
    free(window.found);
    free(window.text);
    free(text);
    return result;
}
