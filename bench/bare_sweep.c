/* The least that a deletion by size, age or name takes: getdents64, statx where it is asked for, and unlinkat.
 *
 *     bare_sweep DIRECTORY name|size|age N_WORKERS
 *
 * Two levels, as bench/sweeps.py makes them: the directory's own directories are shared out between processes. On ext4
 * names are taken in the order of inode numbers, all of a directory together, as each rival of ours that is quick does.
 * It asks nothing else, sees no mount, no error but the first, and tells nothing.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../fusefs/linux/native/dirent.h"

enum { MIB = 1 << 20, OLD_S = 1100000000 };
enum job { NAME, SIZE, AGE };

struct found {
    uint64_t ino;
    char *name;
};

static int by_inode(const void *one, const void *other) {
    uint64_t a = ((const struct found *)one)->ino, b = ((const struct found *)other)->ino;
    return (a > b) - (a < b);
}

static bool is_chosen(int fd, const char *name, enum job job) {
    struct statx told;
    if (job == NAME) {
        size_t length = strlen(name);
        return length > 4 && !memcmp(name + length - 4, ".log", 4);
    }
    if (statx(fd, name, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &told) < 0)
        err(1, "statx %s", name);
    return job == SIZE ? told.stx_size > MIB : told.stx_mtime.tv_sec < OLD_S;
}

static void sweep(int fd, enum job job) {
    static char room[ROOM] __attribute__((aligned(8)));
    struct found *found = NULL;
    size_t n = 0, n_room = 0;
    long size;
    while ((size = syscall(SYS_getdents64, fd, room, sizeof room)) > 0)
        for (long at = 0; at < size;) {
            struct entry *entry = (struct entry *)(room + at);
            at += entry->length;
            if (entry->kind != DT_REG || (job == NAME && !is_chosen(fd, entry->name, job)))
                continue;
            if (n == n_room && !(found = realloc(found, (n_room = 2 * n_room + 1024) * sizeof *found)))
                err(1, "realloc");
            found[n].ino = entry->ino;
            if (!(found[n++].name = strdup(entry->name)))
                err(1, "strdup");
        }
    if (size < 0)
        err(1, "getdents64");
    qsort(found, n, sizeof *found, by_inode);
    for (size_t at = 0; at < n; at++) {
        if ((job == NAME || is_chosen(fd, found[at].name, job)) && unlinkat(fd, found[at].name, 0) < 0)
            err(1, "unlinkat %s", found[at].name);
        free(found[at].name);
    }
    free(found);
}

int main(int argc, char **argv) {
    if (argc != 4)
        errx(2, "usage: bare_sweep DIRECTORY name|size|age N_WORKERS");
    enum job job = !strcmp(argv[2], "name") ? NAME : !strcmp(argv[2], "size") ? SIZE : AGE;
    int top = open(argv[1], O_RDONLY | O_DIRECTORY), n_workers = atoi(argv[3]);
    if (top < 0)
        err(1, "%s", argv[1]);
    unsigned *next = mmap(NULL, sizeof *next, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct dirent **entries;
    int n = scandir(argv[1], &entries, NULL, alphasort);
    if (n < 0 || next == MAP_FAILED)
        err(1, "scandir");
    for (int worker = 0; worker < n_workers; worker++) {
        pid_t pid = fork();
        if (pid < 0)
            err(1, "fork");
        if (pid)
            continue;
        for (unsigned at; (at = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < (unsigned)n;) {
            int fd = is_dots(entries[at]->d_name) ? -1 : openat(top, entries[at]->d_name, O_RDONLY | O_DIRECTORY);
            if (fd < 0)
                continue;
            sweep(fd, job);
            close(fd);
        }
        exit(0);
    }
    int status, failed = 0;
    while (wait(&status) > 0)
        failed |= status;
    return failed != 0;
}
