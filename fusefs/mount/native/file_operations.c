/* Operations on open files, by handle, and OPEN. */
#include "core.h"

#include <stdio.h>
#include <sys/uio.h>

enum { DATA_ONLY = 1 };                           /* flag of FSYNC */
static const uint64_t COPIED_BYTES_MAX = 64 << 20; /* per call: a client that is killed meanwhile waits for it */

/* OPEN. */

/* Check whether a file supports O_DIRECT. Returns 0 or an errno; EINVAL: it does not */
static int check_direct_io(int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int direct = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NONBLOCK);
    if (direct < 0)
        return errno;
    close(direct);
    return 0;
}

/* Open a node as the caller, and get a backing id if it is not open yet. is_first: it is not open yet; is_passed: it is
 * passed through, or may be mapped so. Called without the tables lock. Returns 0 or an errno. */
static int open_file(Request *request, Route *route, uint32_t flags, bool is_first, bool is_passed, Stat *st, int *fd,
                     OpenedBacking *opening) {
    const Core *core = request->core;
    int held;
    int error = reach_inode(request->core, route, st, &held);
    if (error)
        return error;
    error = open_as_caller(request, held < 0 ? route->fd->number : held, st, flags, fd);
    if (held >= 0)
        close(held);
    if (error)
        return error;
    bool is_direct = true;
    if (flags & O_DIRECT)
        error = check_direct_io(*fd);
    if (error == EINVAL && !is_passed)
        error = 0, is_direct = false;
    if (!error && is_first && is_direct)
        *opening = open_backing(request, *fd, st);
    if (!error && core->is_shared && opening->backing == NULL)
        error = stat_at(*fd, "", core->statx_flags, st);
    if (!error && flags & O_APPEND)
        clear_append(*fd);
    if (error)
        close(*fd);
    return error;
}

int do_open(Request *request) {
    Core *core = request->core;
    uint32_t flags;
    Route route;
    Stat st;
    OpenedBacking opening = {0};
    int fd = -1;
    memcpy(&flags, request->op_in, sizeof flags);
    int result = open_route(request, request->nodeid, &route);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    Node *node = route.node;
    bool truncates = flags & O_TRUNC, is_executed = false;
    for (const Handle *handle = node->handles; handle != NULL; handle = handle->next)
        is_executed |= handle->is_executed;
    /* The kernel sends O_TRUNC for a running program before it checks for that itself, unless the file is also opened
     * for writing. */
    int error = truncates && is_executed ? ETXTBSY : make_room(core->tables, request->uid) ? 0 : EMFILE;
    if (!error) {
        bool is_first = !node->n_open, is_passed = node->backing != NULL || node->is_mapped;
        node->n_changing += truncates;
        calls_begin(request);
        error = open_file(request, &route, flags, is_first, is_passed, &st, &fd, &opening);
        calls_end(request);
        note_refusal(request, node, error);
        node->n_changing -= truncates;
        if (truncates)
            note_change(request, node);
    }
    if (!error) {
        bool is_kept = !core->is_shared || (opening.backing == NULL && are_pages_valid(core->tables, node, &st));
        put_handle(request, node, fd, flags, is_kept, &opening, request->reply_body);
        if (truncates || node->backing != NULL)
            note_cached_change(request, node, NULL);
    }
    close_route(&route);
    return error ? -error : OPEN_BYTES;
}

/* Operations by handle. */

/* A file that a client has open. */
typedef struct {
    Node *node; /* one reference */
    Fd *fd;     /* one reference */
    int64_t writer;
    bool may_have_pages; /* the kernel may have pages that it has not written back */
} OpenFile;

/* Returns false if there is no such handle. */
static bool get_open_file(const Request *request, uint64_t fh, OpenFile *opened) {
    const Handle *handle = handle_of_number(request->core->tables, fh);
    *opened = (OpenFile){0};
    if (handle == NULL)
        return false;
    Node *node = handle->node;
    *opened = (OpenFile){.node = node_take(node), .fd = fd_take(handle->fd), .writer = node->writer_uid};
    for (handle = node->handles; handle != NULL; handle = handle->next)
        opened->may_have_pages |= handle->may_map && node->backing == NULL;
    return true;
}

static void put_open_files(OpenFile *opened, int n) {
    for (int at = 0; at < n; at++) {
        fd_put(opened[at].fd);
        node_put(opened[at].node);
    }
}

static void content_change_begins(Request *request, Node *node) {
    change_begins(node);
    calls_begin(request);
}

static void content_change_ends(Request *request, Node *node) {
    calls_end(request);
    node->n_changing--;
    note_change(request, node);
    note_cached_change(request, node, NULL);
}

/* Assume the credentials that a file is written with, for any client. Returns 0 or an errno; `restore_identity` must
 * follow. */
static int assume_writer(const Request *request, const OpenFile *opened, Identity *writer) {
    int64_t owner = opened->writer;
    Stat st;
    if (owner < 0) {
        int error = stat_at(opened->fd->number, "", 0, &st);
        *writer = (Identity){0};
        if (error)
            return error;
        owner = charged_uid(&st);
    }
    *writer = writer_identity(request->core, opened->fd->number, (uint32_t)owner);
    return assume_identity(request->core, writer);
}

int do_read(Request *request) {
    struct {
        uint64_t fh;
        int64_t offset;
        uint32_t size;
    } in; /* first part of struct fuse_read_in */
    OpenFile opened;
    memcpy(&in, request->op_in, 20);
    if (!get_open_file(request, in.fh, &opened))
        return -EBADF;
    calls_begin(request);
    ssize_t n = pread(opened.fd->number, request->reply_body, in.size < BODY_BYTES_MAX ? in.size : BODY_BYTES_MAX,
                      in.offset);
    int result = n < 0 ? -errno : (int)n;
    calls_end(request);
    put_open_files(&opened, 1);
    return result;
}

int do_write(Request *request) {
    struct {
        uint64_t fh;
        int64_t offset;
        uint32_t size, how;
        uint64_t lock_owner;
        uint32_t flags, padding; /* the file's present flags: with O_APPEND, the data is appended */
    } in;                        /* struct fuse_write_in */
    OpenFile opened;
    Identity writer;
    ssize_t n = -1;
    memcpy(&in, request->op_in, sizeof in);
    if (!get_open_file(request, in.fh, &opened))
        return -EBADF;
    struct iovec data = {(char *)(uintptr_t)request->payload,
                         in.size < request->n_payload ? in.size : request->n_payload};
    content_change_begins(request, opened.node);
    int error = assume_writer(request, &opened, &writer);
    if (!error) {
        n = in.flags & O_APPEND ? pwritev2(opened.fd->number, &data, 1, in.offset, RWF_APPEND)
                                : pwrite(opened.fd->number, data.iov_base, data.iov_len, in.offset);
        error = n < 0 ? errno : 0;
    }
    restore_identity(request->core, &writer);
    content_change_ends(request, opened.node);
    put_open_files(&opened, 1);
    uint32_t out[2] = {(uint32_t)n, 0}; /* struct fuse_write_out */
    if (error)
        return -error;
    memcpy(request->reply_body, out, sizeof out);
    return sizeof out;
}

/* Find the next data (SEEK_DATA), or the next hole.
 *
 * The kernel does not write back its pages before LSEEK. So a file that may have such pages is all data, as on a
 * filesystem without holes. Source: fuse_file_llseek in fs/fuse/file.c */
int do_lseek(Request *request) {
    struct {
        uint64_t fh;
        int64_t offset;
        uint32_t whence;
    } in; /* first part of struct fuse_lseek_in */
    OpenFile opened;
    Stat st;
    memcpy(&in, request->op_in, 20);
    if (!get_open_file(request, in.fh, &opened))
        return -EBADF;
    int error;
    calls_begin(request);
    if (opened.may_have_pages) {
        error = stat_at(opened.fd->number, "", 0, &st);
        if (!error && (in.offset < 0 || (uint64_t)in.offset >= st.size))
            error = ENXIO;
        if (!error && in.whence != SEEK_DATA)
            in.offset = (int64_t)st.size;
    } else {
        in.offset = lseek(opened.fd->number, in.offset, (int)in.whence);
        error = in.offset < 0 ? errno : 0;
    }
    calls_end(request);
    put_open_files(&opened, 1);
    memcpy(request->reply_body, &in.offset, sizeof in.offset);
    return error ? -error : (int)sizeof in.offset;
}

/* Allocate blocks for a part of a file, or turn it into a hole or zeros. */
int do_fallocate(Request *request) {
    struct {
        uint64_t fh;
        int64_t offset, size;
        uint32_t mode, padding;
    } in; /* struct fuse_fallocate_in */
    OpenFile opened;
    Identity writer;
    memcpy(&in, request->op_in, sizeof in);
    if (!get_open_file(request, in.fh, &opened))
        return -EBADF;
    content_change_begins(request, opened.node);
    uint32_t mode = setid_mode(opened.fd->number);
    int error = assume_writer(request, &opened, &writer);
    if (!error)
        error = fallocate(opened.fd->number, (int)in.mode, in.offset, in.size) < 0 ? errno : 0;
    restore_identity(request->core, &writer);
    int error_of_bits = restore_setid_bits(request, opened.fd->number, mode);
    content_change_ends(request, opened.node);
    put_open_files(&opened, 1);
    return error ? -error : -error_of_bits;
}

/* Copy, perhaps by sharing blocks. If not all is copied, the kernel requests the rest. After EXDEV (not supported), the
 * kernel reads and writes instead. Returns the number of bytes, or a negative errno. */
static ssize_t copy_range(Request *request) {
    struct {
        uint64_t fh;
        int64_t offset;
        uint64_t to_nodeid, to_fh;
        int64_t to_offset;
        uint64_t size, flags;
    } in; /* struct fuse_copy_file_range_in */
    OpenFile opened[2];
    Identity writer;
    Stat before, after;
    ssize_t n = -1;
    memcpy(&in, request->op_in, sizeof in);
    bool are_open = get_open_file(request, in.fh, &opened[0]);
    are_open &= get_open_file(request, in.to_fh, &opened[1]);
    if (!are_open) {
        put_open_files(opened, 2);
        return -EBADF;
    }
    int from = opened[0].fd->number, to = opened[1].fd->number;
    content_change_begins(request, opened[1].node);
    uint32_t mode = setid_mode(to);
    int error = stat_at(from, "", 0, &before);
    int error_of_writer = assume_writer(request, &opened[1], &writer);
    error = error ? error : error_of_writer;
    if (!error) {
        n = copy_file_range(from, &in.offset, to, &in.to_offset,
                            in.size < COPIED_BYTES_MAX ? in.size : COPIED_BYTES_MAX, 0);
        error = n < 0 ? errno : 0;
    }
    restore_identity(request->core, &writer);
    int error_of_bits = restore_setid_bits(request, to, mode);
    bool is_accessed = !error && !stat_at(from, "", 0, &after) && /* the kernel does not know that */
                       (before.atime_s != after.atime_s || before.atime_ns != after.atime_ns);
    content_change_ends(request, opened[1].node);
    note_cached_change(request, opened[0].node, NULL);
    if (is_accessed)
        invalidate_attributes(request->core->tables, opened[0].node);
    put_open_files(opened, 2);
    return error ? -error : error_of_bits ? -error_of_bits : n;
}

int do_copy_file_range(Request *request) {
    ssize_t n = copy_range(request);
    uint32_t out[2] = {(uint32_t)n, 0}; /* struct fuse_write_out */
    memcpy(request->reply_body, out, sizeof out);
    return n < 0 ? (int)n : (int)sizeof out;
}

int do_copy_file_range_64(Request *request) {
    int64_t n = copy_range(request);
    memcpy(request->reply_body, &n, sizeof n);
    return n < 0 ? (int)n : (int)sizeof n;
}

/* A client closes a file, which may report that earlier writes have failed. For filesystems where this can't happen,
 * the reply is ENOSYS, and the kernel sends no more of these requests. */
int do_flush(Request *request) {
    uint64_t fh;
    OpenFile opened;
    memcpy(&fh, request->op_in, sizeof fh);
    if (!request->core->is_flushed)
        return -ENOSYS;
    if (!get_open_file(request, fh, &opened))
        return -EBADF;
    calls_begin(request);
    int fd = fcntl(opened.fd->number, F_DUPFD_CLOEXEC, 0);
    int error = fd < 0 || close(fd) < 0 ? errno : 0;
    calls_end(request);
    put_open_files(&opened, 1);
    return -error;
}

int do_fsync(Request *request) {
    struct {
        uint64_t fh;
        uint32_t flags, padding;
    } in; /* struct fuse_fsync_in */
    OpenFile opened;
    memcpy(&in, request->op_in, sizeof in);
    if (!get_open_file(request, in.fh, &opened))
        return -EBADF;
    calls_begin(request);
    int error = (in.flags & DATA_ONLY ? fdatasync : fsync)(opened.fd->number) < 0 ? errno : 0;
    calls_end(request);
    put_open_files(&opened, 1);
    return -error;
}

/* The last handle of a node without a name ends the node. */
int do_release(Request *request) {
    Core *core = request->core;
    Tables *t = core->tables;
    uint64_t fh;
    OpenFile opened;
    Stat st;
    memcpy(&fh, request->op_in, sizeof fh);
    if (!get_open_file(request, fh, &opened))
        return -EBADF;
    Node *node = opened.node;
    handle_of_number(t, fh)->is_executed = false; /* the file's next writer may be quicker than the stat */
    if (node->n_open == 1 && node->found_at.parent == NULL && !is_root(core, node)) {
        calls_begin(request);
        if (stat_at(opened.fd->number, "", core->statx_flags, &st))
            memset(&st, 0, sizeof st); /* treat it as removed, as it could not be stat'ed */
        calls_end(request);
        if (node->n_open == 1 && (node->is_directory || !st.nlink))
            detach_node(t, node, &st);
    }
    const Handle *handle = handle_of_number(t, fh);
    bool was_passed = handle != NULL && handle->is_passed;
    node_put(close_handle(t, fh));
    if (was_passed && !node->n_open && !node->is_mapped)
        note_cached_change(request, node, NULL);
    end_unused(request, node);
    put_open_files(&opened, 1);
    return 0;
}
