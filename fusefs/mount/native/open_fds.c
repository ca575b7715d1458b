/* Open fds: counted references to them, a bounded list of directories' fds, clients' handles and each user's share of
 * these.
 *
 * A thread counts a reference while it uses an fd, so none is closed during a call. The thread that drops the last
 * reference closes the fd later, in `close_fds`, without the tables lock and the interpreter's lock, as the last close
 * may take long. */
#include "core.h"

#include <sys/ioctl.h>

static const unsigned long BACKING_CLOSE = 0x4004E502; /* FUSE_DEV_IOC_BACKING_CLOSE */
enum { FOR_EXECUTION = 0x20, DIRECTORIES_MIN = 16 };

_Thread_local bool holds_tables; /* this Python thread holds the tables lock */
static _Thread_local Fd *fds_to_close;

/* Make a counted fd, or the counted backing id of a file that is passed through. */
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
    fd->next = fds_to_close;
    fds_to_close = fd;
}

bool has_fds_to_close(void) { return fds_to_close != NULL; }

void close_fds(void) {
    for (Fd *fd; (fd = fds_to_close) != NULL; free(fd)) {
        fds_to_close = fd->next;
        if (fd->backing_id)
            ioctl(fd->device, BACKING_CLOSE, &fd->backing_id);
        else
            close(fd->number);
    }
}

/* Fds of directories. The root's is not in the list. */

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

/* Return the fd of a directory, with one reference; NULL: it is not open. */
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

void limit_directories(Tables *t, uint32_t n) {
    t->n_directories_max = n;
    while (t->n_directories > n)
        drop_directory_fd(t, t->oldest);
}

/* Keep the fd of a directory that was opened, unless another thread has done so meanwhile. Returns its fd, with one
 * reference. */
Fd *keep_directory_fd(Tables *t, Node *node, int number) {
    Fd *fd = fd_new(number, -1, 0);
    if (node->dir_fd != NULL) {
        fd_put(fd);
        return directory_fd(t, node);
    }
    if (!node->is_listed) /* the node has ended meanwhile */
        return fd;
    node->dir_fd = fd_take(fd);
    enter_list(t, node);
    t->n_directories++;
    limit_directories(t, t->n_directories_max);
    return fd;
}

/* Shares of handles. An eighth of all is reserved for the first sixteen of each user, and a thirty-second for root. Of
 * the rest, no user may have more than eight times what remains free: a single user gets three quarters of all, the
 * next one eight ninths of the remainder, and so on. Handles can't be taken back, so the user with the most is refused
 * early. */

enum { RATIO = 8, RESERVED_PART = 8, ROOTS_PART = 32, N_FIRST = 16 };

static Share *share_of(const Tables *t, uint32_t uid) {
    for (uint32_t at = 0; at < t->n_shares; at++)
        if (t->shares[at].uid == uid)
            return &t->shares[at];
    return NULL;
}

/* Add n handles to a user's share; n may be negative. */
void add_to_share(Tables *t, uint32_t uid, int64_t n) {
    Share *share = share_of(t, uid);
    if (share == NULL) {
        t->shares = allocate(t->shares, (t->n_shares + 1) * sizeof *t->shares);
        share = &t->shares[t->n_shares++];
        *share = (Share){.uid = uid};
    }
    share->n += n;
    t->n_share_handles += n;
    if (!share->n)
        *share = t->shares[--t->n_shares];
}

/* Return whether a user may have one more handle. */
static bool may_open(const Tables *t, uint32_t uid) {
    const Share *share = share_of(t, uid);
    int64_t n_free = t->n_handles_max - t->n_share_handles, has = share == NULL ? 0 : share->n, n_first = N_FIRST;
    int64_t n_roots = t->n_handles_max / ROOTS_PART;
    if (!t->is_for_all)
        return n_free > 0;
    if (uid)
        n_free -= n_roots;
    else if (n_first < n_roots)
        n_first = n_roots;
    return has < n_first ? n_free > 0 : has < RATIO * (n_free - t->n_handles_max / RESERVED_PART);
}

/* Return how many of n handles a single user other than root gets. */
int64_t max_handles_of_user(int64_t n) {
    int64_t most = (n - n / ROOTS_PART - n / RESERVED_PART) * RATIO / (RATIO + 1);
    return most > N_FIRST ? most : N_FIRST;
}

/* Make room for a user's handle: handles and directories share the fds, so directories are closed. Returns false if the
 * user may have no more. */
bool make_room(Tables *t, uint32_t uid) {
    if (!may_open(t, uid))
        return false;
    int64_t n = (int64_t)t->n_fds - t->n_handles - 1;
    limit_directories(t, n > DIRECTORIES_MIN ? (uint32_t)n : DIRECTORIES_MIN);
    return true;
}

/* Handles: the number of a handle is that of its fd. */

Handle *handle_of_number(const Tables *t, uint64_t fh) { return fh < t->n_slots ? t->handles[fh] : NULL; }

/* Make a handle of a node, with an fd that belongs to the tables from now on. The node's first handle decides between
 * passthrough and page cache for all.
 *
 * backing: the node's backing id if it is not open yet; NULL: the kernel caches its pages.
 * writer: the uid that writes it, if it is not open yet. */
void open_handle(Tables *t, Node *node, int number, uint32_t uid, uint32_t flags, Fd *backing, int64_t writer) {
    uint32_t access = flags & O_ACCMODE;
    if (!node->n_open)
        node->backing = backing, node->writer_uid = writer;
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
    free(node->final_stat); /* its last link was removed while it was being opened */
    node->final_stat = NULL;
    if (handle->writes)
        node->cached_until_s = 0; /* the kernel drops cached attributes of a file that it writes */
    if (handle->is_passed && handle->writes)
        node->n_passing_writers++;
    if (handle->is_passed && handle->may_map && !node->is_mapped) {
        node->is_mapped = !t->is_shared;
        if (!(flags & O_CREAT)) /* the kernel itself does not notice writes to mapped memory */
            notify_inval_inode(t, node);
    }
    t->n_handles++;
    add_to_share(t, uid, 1);
}

/* Remove a handle. Returns its node, with one reference; NULL: no such handle. */
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

/* Return whether a node's attributes are unknown, as it may be written in passthrough. A mapping outlives its
 * handle. */
bool is_unsteady(const Node *node) { return node->n_passing_writers || node->is_mapped; }

void close_tables(Tables *t) {
    for (uint32_t fh = 0; fh < t->n_slots; fh++)
        node_put(close_handle(t, fh));
    limit_directories(t, 0);
}
