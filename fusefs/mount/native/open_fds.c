/* What is open: counted fds, directories' fds in a list of bounded length, clients' handles and their fair shares.
 *
 * Whoever uses an fd counts it, so none is closed under a call. The thread that drops the last use closes it later, in
 * `close_fds`, when it has neither the tables nor the interpreter's lock: a last close may take its time. */
#include "core.h"

#include <sys/ioctl.h>

static const unsigned long BACKING_CLOSE = 0x4004E502; /* FUSE_DEV_IOC_BACKING_CLOSE */
enum { FOR_EXECUTION = 0x20, DIRECTORIES_MIN = 16 };

_Thread_local bool holds_tables; /* this thread, for Python */
static _Thread_local Fd *to_close;

/* An fd, or the id that a file is passed through by. */
Fd *fd_new(int number, int device, int backing_id) {
    Fd *fd = allocate(NULL, sizeof *fd);
    *fd = (Fd){.number = number, .device = device, .backing_id = backing_id, .n_uses = 1};
    return fd;
}

Fd *fd_take(Fd *fd) {
    __atomic_add_fetch(&fd->n_uses, 1, __ATOMIC_RELAXED);
    return fd;
}

void fd_put(Fd *fd) {
    if (fd == NULL || __atomic_sub_fetch(&fd->n_uses, 1, __ATOMIC_ACQ_REL))
        return;
    fd->next = to_close;
    to_close = fd;
}

bool has_fds_to_close(void) { return to_close != NULL; }

void close_fds(void) {
    for (Fd *fd; (fd = to_close) != NULL; free(fd)) {
        to_close = fd->next;
        if (fd->backing_id)
            ioctl(fd->device, BACKING_CLOSE, &fd->backing_id);
        else
            close(fd->number);
    }
}

/* Directories' fds. The root's is not in the list. */

static void leave_list(Tables *t, Node *node) {
    *(node->newer != NULL ? &node->newer->older : &t->newest) = node->older;
    *(node->older != NULL ? &node->older->newer : &t->oldest) = node->newer;
    node->newer = node->older = NULL;
}

static void enter_list(Tables *t, Node *node) {
    node->older = t->newest;
    *(t->newest != NULL ? &t->newest->newer : &t->oldest) = node;
    t->newest = node;
}

/* The fd of a directory, with one use; NULL: none is open. */
Fd *directory_fd(Tables *t, Node *node) {
    if (node->dir_fd == NULL)
        return NULL;
    if (node != t->root && node != t->newest) {
        leave_list(t, node);
        enter_list(t, node);
    }
    return fd_take(node->dir_fd);
}

void drop_directory_fd(Tables *t, Node *node) {
    if (node->dir_fd == NULL || node == t->root)
        return;
    leave_list(t, node);
    fd_put(node->dir_fd);
    node->dir_fd = NULL;
    t->n_directories--;
}

/* From now on no more directories may be open at a time. */
void limit_directories(Tables *t, uint32_t n) {
    t->n_directories_max = n;
    while (t->n_directories > n)
        drop_directory_fd(t, t->oldest);
}

/* A directory was opened, unless another thread was quicker; its fd, with one use. */
Fd *keep_directory_fd(Tables *t, Node *node, int number) {
    Fd *fd = fd_new(number, -1, 0);
    if (node->dir_fd != NULL) {
        fd_put(fd);
        return directory_fd(t, node);
    }
    if (!node->is_listed) /* it has ended meanwhile */
        return fd;
    node->dir_fd = fd_take(fd);
    enter_list(t, node);
    t->n_directories++;
    limit_directories(t, t->n_directories_max);
    return fd;
}

/* Shares. An eighth is kept for each user's first sixteen, and a thirty-second for root. Of the rest no user may have more
 * than eight times what is left: one alone gets three quarters of all, the next one eight ninths of what is left then, and
 * so on. Nothing can be taken back, so the user with most must be refused in time. */

enum { RATIO = 8, KEPT_PART = 8, ROOTS_PART = 32, N_FIRST = 16 };

static Share *share_of(const Tables *t, uint32_t uid) {
    for (uint32_t at = 0; at < t->n_shares; at++)
        if (t->shares[at].uid == uid)
            return &t->shares[at];
    return NULL;
}

/* A user has so many more handles, or fewer. */
void add_to_share(Tables *t, uint32_t uid, int64_t n) {
    Share *share = share_of(t, uid);
    if (share == NULL) {
        t->shares = allocate(t->shares, (t->n_shares + 1) * sizeof *t->shares);
        share = &t->shares[t->n_shares++];
        *share = (Share){.uid = uid};
    }
    share->n += n;
    t->n_given += n;
    if (!share->n)
        *share = t->shares[--t->n_shares];
}

/* Whether a user may have one more. */
static bool may_open(const Tables *t, uint32_t uid) {
    const Share *share = share_of(t, uid);
    int64_t left = t->n_handles_max - t->n_given, has = share == NULL ? 0 : share->n, n_first = N_FIRST;
    int64_t n_roots = t->n_handles_max / ROOTS_PART;
    if (!t->is_for_all)
        return left > 0;
    if (uid)
        left -= n_roots;
    else if (n_first < n_roots)
        n_first = n_roots;
    return has < n_first ? left > 0 : has < RATIO * (left - t->n_handles_max / KEPT_PART);
}

/* How many of n a lone user gets who is not root. */
int64_t most_of_one(int64_t n) {
    int64_t most = (n - n / ROOTS_PART - n / KEPT_PART) * RATIO / (RATIO + 1);
    return most > N_FIRST ? most : N_FIRST;
}

/* Room for a handle of a user's: the fds are shared between handles and directories, which give way. Returns false: the
 * user has its share. */
bool make_room(Tables *t, uint32_t uid) {
    if (!may_open(t, uid))
        return false;
    int64_t n = (int64_t)t->n_fds - t->n_handles - 1;
    limit_directories(t, n > DIRECTORIES_MIN ? (uint32_t)n : DIRECTORIES_MIN);
    return true;
}

/* Handles: the number of one is that of its fd. */

Handle *handle_of_number(const Tables *t, uint64_t fh) { return fh < t->n_slots ? t->handles[fh] : NULL; }

/* A handle of a node by an fd, which is the tables' from now on. The first one of a node decides for all how it is open.
 *
 * backing: the id that the node is passed through by, if it is not open yet; NULL: the kernel keeps its pages
 * writer: whom it is written as, if it is not open yet */
void open_handle(Tables *t, Node *node, int number, uint32_t uid, uint32_t flags, Fd *backing, int64_t writer) {
    uint32_t access = flags & O_ACCMODE;
    if (!node->n_open)
        node->backing = backing, node->writer = writer;
    else
        fd_put(backing);
    if ((uint32_t)number >= t->n_slots) {
        uint32_t n = 2 * (uint32_t)number + 64;
        t->handles = allocate(t->handles, n * sizeof *t->handles);
        memset(t->handles + t->n_slots, 0, (n - t->n_slots) * sizeof *t->handles);
        t->n_slots = n;
    }
    Handle *handle = allocate(NULL, sizeof *handle);
    *handle = (Handle){
        .node = node_take(node), .fd = fd_new(number, -1, 0), .next = node->handles, .uid = uid,
        .writes = access != O_RDONLY, .may_map = access == O_RDWR, .is_executed = flags & FOR_EXECUTION,
        .appends = flags & O_APPEND, .is_passed = node->backing != NULL,
    };
    node->handles = t->handles[number] = handle;
    node->n_open++;
    free(node->last); /* if its last link went while it was being opened */
    node->last = NULL;
    if (handle->writes)
        node->told_until_s = 0; /* the kernel forgets what it was sent of what it writes */
    if (handle->is_passed && handle->writes)
        node->n_passing_writers++;
    if (handle->is_passed && handle->may_map && !node->is_mapped) {
        node->is_mapped = !t->is_shared;
        if (!(flags & O_CREAT)) /* what is written to memory, the kernel does not notice itself */
            notify_attributes(t, node);
    }
    t->n_handles++;
    add_to_share(t, uid, 1);
}

/* Let a handle go. Returns its node, with one use; NULL: there is no such handle. */
Node *close_handle(Tables *t, uint64_t fh) {
    Handle *handle = handle_of_number(t, fh);
    if (handle == NULL)
        return NULL;
    Node *node = handle->node;
    Handle **at = &node->handles;
    while (*at != handle)
        at = &(*at)->next;
    *at = handle->next;
    t->handles[fh] = NULL;
    t->n_handles--;
    add_to_share(t, handle->uid, -1);
    if (handle->is_passed && handle->writes)
        node->n_passing_writers--;
    fd_put(handle->fd);
    if (!--node->n_open) {
        fd_put(node->backing);
        node->backing = NULL;
    }
    free(handle);
    return node;
}

/* What may be written past us: its present attributes are unknown. A mapping outlives the handle that it was made by. */
bool is_unsteady(const Node *node) { return node->n_passing_writers || node->is_mapped; }

/* Close all. */
void close_tables(Tables *t) {
    for (uint32_t fh = 0; fh < t->n_slots; fh++)
        node_put(close_handle(t, fh));
    limit_directories(t, 0);
}
