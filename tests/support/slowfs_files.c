/* Of slowfs: open files and directories, and extended attributes. */
#include "slowfs.h"

#include <dirent.h>
#include <sys/xattr.h>

struct listing {
    DIR *dir;
    struct dirent *ahead; /* read, and not yet told */
    off_t offset;         /* of what comes next */
};

static void slow_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
    char path[PATH_SIZE];
    if (begin(req, OP_open, ino, NULL))
        return;
    path_of(ino, path);
    int fd = open(path, (file->flags & ~O_NOFOLLOW) | O_CLOEXEC);
    if (fd < 0) {
        done(req, -1);
        return;
    }
    file->fh = (uint64_t)fd;
    end();
    if (fuse_reply_open(req, file) == -ENOENT)
        close(fd);
}

static void slow_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *file)
{
    struct fuse_entry_param entry;
    if (begin(req, OP_create, parent, name))
        return;
    act_as(req);
    int fd = openat(fd_of(parent), name, file->flags | O_CREAT | O_NOFOLLOW | O_CLOEXEC, mode);
    act_as_root();
    if (fd < 0) {
        done(req, -1);
        return;
    }
    int error = find(parent, name, &entry);
    file->fh = (uint64_t)fd;
    end();
    if (error)
        fuse_reply_err(req, error);
    else if (fuse_reply_create(req, &entry, file) == -ENOENT)
        forget(entry.ino, 1);
    else
        return;
    close(fd);
}

static void slow_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *file)
{
    if (begin(req, OP_read, ino, NULL))
        return;
    char *content = malloc(size);
    ssize_t n = content ? pread((int)file->fh, content, size, offset) : -1;
    if (n < 0) {
        done(req, -1);
    } else {
        end();
        fuse_reply_buf(req, content, (size_t)n);
    }
    free(content);
}

static void slow_write(
    fuse_req_t req, fuse_ino_t ino, const char *content, size_t size, off_t offset, struct fuse_file_info *file)
{
    if (begin(req, OP_write, ino, NULL))
        return;
    ssize_t n = pwrite((int)file->fh, content, size, offset);
    if (n < 0) {
        done(req, -1);
        return;
    }
    end();
    fuse_reply_write(req, (size_t)n);
}

static void slow_fsync(fuse_req_t req, fuse_ino_t ino, int is_data_only, struct fuse_file_info *file)
{
    if (begin(req, OP_fsync, ino, NULL))
        return;
    done(req, is_data_only ? fdatasync((int)file->fh) : fsync((int)file->fh));
}

static void slow_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
    (void)ino;
    close((int)file->fh);
    fuse_reply_err(req, 0);
}

static struct listing *listing_of(struct fuse_file_info *file)
{
    return (struct listing *)(uintptr_t)file->fh;
}

static void close_listing(struct listing *listing)
{
    closedir(listing->dir);
    free(listing);
}

static void slow_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
    if (begin(req, OP_opendir, ino, NULL))
        return;
    struct listing *listing = calloc(1, sizeof *listing);
    int fd = openat(fd_of(ino), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!listing || fd < 0 || !(listing->dir = fdopendir(fd))) {
        done(req, -1);
        if (fd >= 0)
            close(fd);
        free(listing);
        return;
    }
    file->fh = (uint64_t)(uintptr_t)listing;
    end();
    if (fuse_reply_open(req, file) == -ENOENT)
        close_listing(listing);
}

/* As many names as have room. The kernel asks once at a time for one open directory. */
static ssize_t fill(fuse_req_t req, struct listing *listing, char *buffer, size_t size)
{
    size_t used = 0;
    for (;;) {
        errno = 0;
        if (!listing->ahead && !(listing->ahead = readdir(listing->dir)))
            return errno && !used ? -1 : (ssize_t)used;
        struct dirent *next = listing->ahead;
        struct stat st = {.st_ino = next->d_ino, .st_mode = DTTOIF(next->d_type)};
        size_t needed = fuse_add_direntry(req, buffer + used, size - used, next->d_name, &st, next->d_off);
        if (needed > size - used)
            return (ssize_t)used;
        used += needed;
        listing->offset = next->d_off;
        listing->ahead = NULL;
    }
}

static void slow_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *file)
{
    struct listing *listing = listing_of(file);
    if (begin(req, OP_readdir, ino, NULL))
        return;
    char *buffer = malloc(size);
    if (offset != listing->offset) {
        seekdir(listing->dir, offset);
        listing->ahead = NULL;
        listing->offset = offset;
    }
    ssize_t used = buffer ? fill(req, listing, buffer, size) : -1;
    if (used < 0) {
        done(req, -1);
    } else {
        end();
        fuse_reply_buf(req, buffer, (size_t)used);
    }
    free(buffer);
}

static void slow_fsyncdir(fuse_req_t req, fuse_ino_t ino, int is_data_only, struct fuse_file_info *file)
{
    if (begin(req, OP_fsyncdir, ino, NULL))
        return;
    int fd = dirfd(listing_of(file)->dir);
    done(req, is_data_only ? fdatasync(fd) : fsync(fd));
}

static void slow_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file)
{
    (void)ino;
    close_listing(listing_of(file));
    fuse_reply_err(req, 0);
}

/* Extended attributes. */

static int refuses_xattrs(fuse_req_t req, fuse_ino_t ino)
{
    struct stat st;
    uint32_t xattrs = control->xattrs;
    if (xattrs & XATTRS_UNKNOWN)
        errno = ENOSYS;
    else if (xattrs & XATTRS_FOR_ROOT && fuse_req_ctx(req)->uid)
        errno = ENODATA;
    else if (fstatat(fd_of(ino), "", &st, AT_EMPTY_PATH) == 0) {
        if (xattrs & (S_ISDIR(st.st_mode) ? XATTRS_OF_DIRECTORIES : XATTRS_OF_FILES))
            return 0;
        errno = EOPNOTSUPP;
    }
    done(req, -1);
    return 1;
}

static void slow_setxattr(
    fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags)
{
    char path[PATH_SIZE];
    if (begin(req, OP_setxattr, ino, NULL))
        return;
    if (refuses_xattrs(req, ino))
        return;
    path_of(ino, path);
    done(req, setxattr(path, name, value, size, flags));
}

static void slow_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    char path[PATH_SIZE];
    if (begin(req, OP_removexattr, ino, NULL))
        return;
    if (refuses_xattrs(req, ino))
        return;
    path_of(ino, path);
    done(req, removexattr(path, name));
}

static void reply_xattr(fuse_req_t req, char *value, size_t size, ssize_t n)
{
    if (n < 0) {
        done(req, -1);
    } else {
        end();
        if (size)
            fuse_reply_buf(req, value, (size_t)n);
        else
            fuse_reply_xattr(req, (size_t)n);
    }
    free(value);
}

static void slow_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
    char path[PATH_SIZE];
    if (begin(req, OP_getxattr, ino, NULL))
        return;
    if (refuses_xattrs(req, ino))
        return;
    path_of(ino, path);
    char *value = malloc(size + 1);
    reply_xattr(req, value, size, value ? getxattr(path, name, value, size) : -1);
}

static void slow_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size)
{
    char path[PATH_SIZE];
    if (begin(req, OP_listxattr, ino, NULL))
        return;
    if (refuses_xattrs(req, ino))
        return;
    path_of(ino, path);
    char *names = malloc(size + 1);
    reply_xattr(req, names, size, names ? listxattr(path, names, size) : -1);
}

const struct fuse_lowlevel_ops file_handlers = {
    .open = slow_open,
    .create = slow_create,
    .read = slow_read,
    .write = slow_write,
    .fsync = slow_fsync,
    .release = slow_release,
    .opendir = slow_opendir,
    .readdir = slow_readdir,
    .fsyncdir = slow_fsyncdir,
    .releasedir = slow_releasedir,
    .setxattr = slow_setxattr,
    .getxattr = slow_getxattr,
    .listxattr = slow_listxattr,
    .removexattr = slow_removexattr,
};
