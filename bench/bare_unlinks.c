/* The least that emptying one flat directory takes: unlinkat by many processes at once, each through a mount of its own.
 *
 *     bare_unlinks N_WORKERS N_FILES DIRECTORY...
 *
 * The files are f0, f1 and so on; each DIRECTORY is the same one, as another mount has it, with so many workers. They
 * take names in turns from one counter. Nothing is listed, nothing looked at, and the first error ends it.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { AT_ONCE = 8 };

static void unlink_some(int fd, unsigned *next, unsigned n_files) {
    char name[16];
    for (unsigned at; (at = __atomic_fetch_add(next, AT_ONCE, __ATOMIC_RELAXED)) < n_files;)
        for (unsigned one = at; one < at + AT_ONCE && one < n_files; one++) {
            snprintf(name, sizeof name, "f%u", one);
            if (unlinkat(fd, name, 0) < 0)
                err(1, "unlinkat %s", name);
        }
}

int main(int argc, char **argv) {
    if (argc < 4)
        errx(2, "usage: bare_unlinks N_WORKERS N_FILES DIRECTORY...");
    int n_workers = atoi(argv[1]);
    unsigned *next = mmap(NULL, sizeof *next, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (next == MAP_FAILED)
        err(1, "mmap");
    for (int at = 3; at < argc; at++) {
        int fd = open(argv[at], O_RDONLY | O_DIRECTORY);
        if (fd < 0)
            err(1, "%s", argv[at]);
        for (int worker = 0; worker < n_workers; worker++) {
            pid_t pid = fork();
            if (pid < 0)
                err(1, "fork");
            if (!pid) {
                unlink_some(fd, next, (unsigned)atoi(argv[2]));
                exit(0);
            }
        }
    }
    int status, failed = 0;
    while (wait(&status) > 0)
        failed |= status;
    return failed != 0;
}
