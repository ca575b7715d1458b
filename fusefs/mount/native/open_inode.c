/* Opens or stats a node's inode: by an open fd, by its name in an open directory, or by its file handle. The inode is
 * always verified.
 *
 * Fds of directories are kept, up to a limit. No others are, so that the blocks of deleted files become free. If a name
 * belongs to another inode by now, file handles of the backing filesystem still reach the node. */
#include "core.h"

static const int OPEN_PATH_FLAGS = O_PATH | O_NOFOLLOW | O_CLOEXEC;

/* Links to drop directories (tree/trashd_dir.py) have nodeids without nodes. */
static bool is_drop_link(uint64_t nodeid) { return nodeid >= 3ull << 61 && nodeid < 1ull << 63; }

/* Get the fastest way to a node. */
static Route route_to(Tables *t, Node *node) {
    Route route = {.node = node_take(node)};
    if (node->handles != NULL)
        route.fd = fd_take(node->handles->fd);
    else if (node->kept_fd >= 0)
        route.fd = fd_new(fcntl(node->kept_fd, F_DUPFD_CLOEXEC, 0), -1, 0);
    else if (node->is_directory)
        route.fd = directory_fd(t, node);
    else if (node->found_at.parent != NULL && strlen(node->found_at.name) <= NAME_MAX) {
        route.parent_node = node_take(node->found_at.parent);
        route.dir_fd = directory_fd(t, route.parent_node);
        strcpy(route.name, node->found_at.name);
    }
    return route;
}

/* Get a node by its nodeid, and the fastest way to it. Returns 0; -ESTALE: no such node; or NOT_OURS. */
int open_route(Request *request, uint64_t nodeid, Route *route) {
    Node *node = node_of(request->core->tables, nodeid);
    if (node == NULL)
        return is_drop_link(nodeid) ? NOT_OURS : -ESTALE;
    *route = route_to(request->core->tables, node);
    return 0;
}

void close_route(Route *route) {
    fd_put(route->fd);
    fd_put(route->dir_fd);
    node_put(route->node);
    node_put(route->parent_node);
    *route = (Route){0};
}

/* Return whether attributes are a node's: by inode number and birth time if names change only through the mount; else
 * by its file handle. fd: of the inode with these attributes */
static bool is_same_incarnation(const Core *core, const Node *node, Stat *st, int fd) {
    if (st->ino != node->ino || st->dev != node->dev)
        return false;
    if (!node->n_handle || (!core->is_shared && st->btime_ns))
        return st->btime_ns == node->btime_ns;
    return fetch_file_handle(fd, "", core->statx_flags, st) == 0 &&
           node->n_handle == 2 * sizeof(uint32_t) + st->handle.n_bytes &&
           !memcmp(node->handle, &st->handle, node->n_handle);
}

/* Return the flags to stat a node. A filesystem that is mounted inside is stat'ed with synchronization, as the kernel
 * may have cached nothing of it. */
static int flags_for(const Core *core, const Node *node) {
    return node->dev == core->root_dev ? core->statx_flags : core->statx_flags & WITHOUT_HANDLES;
}

/* Stat a node by its name, in one call; ESTALE: it is not certain to be the node. Called without the tables lock. */
int stat_by_name(const Core *core, const Route *route, Stat *st) {
    if (route->dir_fd == NULL || core->is_shared)
        return ESTALE;
    int error = stat_at(route->dir_fd->number, route->name, flags_for(core, route->node), st);
    bool is_node = !error && st->btime_ns && is_same_incarnation(core, route->node, st, -1);
    return is_node ? 0 : ESTALE;
}

/* Open a node by a name (O_PATH). Returns 0 or an errno: ESTALE: the name belongs to another inode. */
static int open_by_name(const Core *core, const Node *node, int dir_fd, const char *name, Stat *st, int *fd) {
    int held = openat(dir_fd, name, OPEN_PATH_FLAGS);
    if (held < 0)
        return errno == ENOENT || errno == ENOTDIR ? ESTALE : errno;
    int error = stat_at(held, "", flags_for(core, node), st);
    if (!error && !is_same_incarnation(core, node, st, held))
        error = ESTALE;
    if (error)
        close(held);
    else
        *fd = held;
    return error;
}

/* Open a node by its file handle (O_PATH). Returns 0 or an errno: ESTALE: the inode is gone. ENOMEM means the same:
 * the inode is gone, and its number is just being given to a new file (ilookup and iget_locked in fs/inode.c). */
static int open_by_handle(const Core *core, const Node *node, Stat *st, int *fd) {
    int held = open_by_handle_at(core->mount_fd, (struct file_handle *)(uintptr_t)node->handle, OPEN_PATH_FLAGS);
    if (held < 0)
        return errno == ENOMEM ? ESTALE : errno;
    int error = stat_at(held, "", core->statx_flags, st);
    if (error)
        close(held);
    else
        *fd = held;
    return error;
}

/* Get a name of a node, by index, and the fd of its directory if that is open. Returns false after the last name. */
static bool take_name(Core *core, const Node *node, int number, Route *place) {
    tables_lock(core->mutex);
    const NodeName *at = number ? &node->other_names[number - 1] : &node->found_at;
    *place = (Route){0};
    bool is_one = !number || (node->other_names != NULL && number <= N_OTHERS_MAX);
    if (is_one && at->parent != NULL && strlen(at->name) <= NAME_MAX) {
        place->parent_node = node_take(at->parent);
        place->dir_fd = directory_fd(core->tables, place->parent_node);
        strcpy(place->name, at->name);
    }
    tables_unlock(core->mutex);
    return is_one;
}

static void put_name_route(Core *core, Route *place) {
    tables_lock(core->mutex);
    close_route(place);
    tables_unlock(core->mutex);
}

/* Open a node by one of its names. opens: open the name's directory, too, if necessary */
static int open_by_names(Core *core, const Node *node, bool opens, Stat *st, int *fd) {
    Route place;
    int error = ESTALE;
    for (int number = 0; error == ESTALE && take_name(core, node, number, &place); number++) {
        if (opens && place.parent_node != NULL && place.dir_fd == NULL)
            error = open_directory(core, place.parent_node, &place.dir_fd);
        if (place.dir_fd != NULL)
            error = open_by_name(core, node, place.dir_fd->number, place.name, st, fd);
        put_name_route(core, &place);
    }
    return error;
}

/* Return whether a node can be reached by its file handle, wherever it is. */
static bool has_lasting_handle(const Core *core, const Node *node) {
    return core->mount_fd >= 0 && node->n_handle && node->dev == core->root_dev;
}

/* Open a node that was moved, or whose directory is not open. Called without the tables lock. Returns 0 or an errno. */
static int open_node(Core *core, const Node *node, Stat *st, int *fd) {
    tables_lock(core->mutex);
    bool has_ended = node->final_stat != NULL;
    tables_unlock(core->mutex);
    if (has_ended)
        return ESTALE;
    int error = open_by_names(core, node, false, st, fd);
    if (error == ESTALE && has_lasting_handle(core, node))
        return open_by_handle(core, node, st, fd);
    return error == ESTALE ? open_by_names(core, node, true, st, fd) : error;
}

/* Get the fd of a directory, with one reference. If necessary it is opened, downwards from the nearest open directory
 * above it: without recursion, as a deep directory would need a deep stack. Called without the tables lock. Returns 0
 * or an errno. */
int open_directory(Core *core, Node *directory, Fd **fd) {
    Tables *t = core->tables;
    size_t n = 0;
    int error = 0;
    tables_lock(core->mutex);
    for (Node *at = directory; at != NULL && at->dir_fd == NULL;
         at = has_lasting_handle(core, at) ? NULL : at->found_at.parent)
        n++;
    Node **closed = n ? allocate(NULL, n * sizeof *closed) : NULL, *at = directory;
    for (size_t number = 0; number < n; number++, at = at->found_at.parent)
        closed[number] = node_take(at);
    *fd = n ? NULL : directory_fd(t, directory);
    while (n--) {
        Node *node = closed[n];
        int number;
        Stat st;
        Fd *above = *fd; /* stays open until this one is */
        *fd = NULL;
        if (!error && (*fd = directory_fd(t, node)) == NULL) {
            tables_unlock(core->mutex);
            close_fds(); /* of directories that were closed to make room */
            error = open_node(core, node, &st, &number);
            tables_lock(core->mutex);
            if (!error)
                *fd = keep_directory_fd(t, node, number);
        }
        fd_put(above);
        node_put(node);
    }
    tables_unlock(core->mutex);
    free(closed);
    return error;
}

/* Stat a node. If that takes a new fd, it is returned in `fd`, and the caller owns it. Called without the tables lock.
 * Returns 0, or an errno: ESTALE: the node can't be found any more. */
int reach_inode(Core *core, Route *route, Stat *st, int *fd) {
    *fd = -1;
    if (route->fd == NULL && route->node->is_directory) {
        int error = open_directory(core, route->node, &route->fd);
        if (error)
            return error;
    }
    if (route->fd != NULL)
        return stat_at(route->fd->number, "", flags_for(core, route->node), st);
    if (route->dir_fd != NULL && !open_by_name(core, route->node, route->dir_fd->number, route->name, st, fd))
        return 0;
    return open_node(core, route->node, st, fd);
}

/* Get an fd of a node for Python, whose thread may hold the tables lock. */
PyObject *core_open_node(Core *core, PyObject *object) {
    Node *node = node_from(object);
    Stat st;
    int number;
    if (node == NULL)
        return NULL;
    Route route = route_to(core->tables, node);
    PyThreadState *released = PyEval_SaveThread();
    if (holds_tables)
        tables_unlock(core->mutex);
    int error = reach_inode(core, &route, &st, &number);
    tables_lock(core->mutex);
    Fd *fd = error ? NULL : number < 0 ? fd_take(route.fd) : fd_new(number, -1, 0);
    close_route(&route);
    tables_unlock(core->mutex); /* lock order: the interpreter's lock is first */
    PyEval_RestoreThread(released);
    if (holds_tables)
        wait_for_tables(core->mutex);
    if (!error)
        return fd_object(fd);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}
