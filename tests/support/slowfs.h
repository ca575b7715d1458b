/* What the parts of slowfs share; see slowfs.c. */
#ifndef SLOWFS_H
#define SLOWFS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 12)

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What can be asked, in the order of the counters. */
#define OPERATIONS(X)                                                                                                  \
    X(lookup) X(getattr) X(setattr) X(readlink) X(mknod) X(mkdir) X(symlink) X(unlink) X(rmdir) X(rename) X(link)      \
    X(open) X(create) X(read) X(write) X(fsync) X(opendir) X(readdir) X(fsyncdir) X(statfs)                            \
    X(setxattr) X(getxattr) X(listxattr) X(removexattr)
#define NUMBER(what) OP_##what,
enum operation { OPERATIONS(NUMBER) N_OPERATIONS };

/* Who has extended attributes. Without: EOPNOTSUPP, rather than ENOSYS, after which the kernel would never ask again. */
enum {
    XATTRS_OF_FILES = 1,
    XATTRS_OF_DIRECTORIES = 2,
    XATTRS_UNKNOWN = 4,   /* ENOSYS to all */
    XATTRS_FOR_ROOT = 8,  /* others are told that there are none; the kernel leaves it to us who may do what */
};

/* As in fuse_slow.py. */
struct counter {
    char name[24];
    _Atomic uint64_t n;
};
struct control {
    _Atomic uint64_t delay_us;
    _Atomic uint64_t ttl_us;
    _Atomic uint32_t delays_all; /* 0: lookup and getattr only */
    _Atomic uint32_t xattrs; /* flags, above */
    _Atomic uint32_t n_under_way; /* requests, from their arrival to their answer */
    _Atomic uint32_t max_under_way;
    _Atomic uint32_t hangs; /* whether what has hung_name in its name hangs */
    char hung_name[260];
    _Atomic uint32_t refusal; /* the errno that is answered to all, or to what has refused_name in its name; 0: none */
    char refused_name[260];
    struct counter counters[N_OPERATIONS];
};

extern struct control *control;
extern struct fuse_session *session;

/* Nodes: what the kernel knows. One that it asks about stays until the request is answered: it forgets none before. */
enum { PATH_SIZE = 32 };
void open_root(const char *source);
int fd_of(fuse_ino_t ino);                          /* an O_PATH fd */
void path_of(fuse_ino_t ino, char path[PATH_SIZE]); /* for calls that take no such fd */
void forget(fuse_ino_t ino, uint64_t n_lookups);

/* What every request goes through: begin, which may have answered it, then one of the others, which end it. */
int begin(fuse_req_t req, enum operation operation, fuse_ino_t ino, const char *name);
void end(void);
void done(fuse_req_t req, int result); /* -1: errno is the answer */
void reply_found(fuse_req_t req, fuse_ino_t parent, const char *name);
void reply_attributes(fuse_req_t req, fuse_ino_t ino);
int find(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry);

/* What is made belongs to who asked; what he may do, the kernel has decided (default_permissions). */
void act_as(fuse_req_t req);
void act_as_root(void);

/* Handlers of open files, directories and extended attributes. */
extern const struct fuse_lowlevel_ops file_handlers;

#endif
