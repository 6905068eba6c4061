/* A file server in trouble, as LD_PRELOAD: below $UNSTEADY_FOLDER each access fails or is slow for as long as the
   file $UNSTEADY_SWITCH is there. Its first letter says how: s(tale file handle), i(/o error), l(ate by a second). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char mode(void) {
    const char *path = getenv("UNSTEADY_SWITCH");
    char letter = 0;
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY) : -1;
    if (file >= 0) {
        if (read(file, &letter, 1) != 1)
            letter = 0;
        close(file);
    }
    return letter;
}

static int is_below(const char *path) {
    const char *folder = getenv("UNSTEADY_FOLDER");
    if (!path || !folder)
        return 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Wait, or return -1 with errno set: the access must not happen. */
static int suffer(const char *path) {
    int before = errno;
    char letter = is_below(path) ? mode() : 0;
    if (letter == 'l')
        usleep(1000000);
    errno = letter == 's' ? ESTALE : letter == 'i' ? EIO : before;
    return letter == 's' || letter == 'i' ? -1 : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name)                                                     \
    int name(const char *path, int flags, ...) {                        \
        va_list more;                                                   \
        va_start(more, flags);                                          \
        mode_t rights = va_arg(more, mode_t);                           \
        va_end(more);                                                   \
        return suffer(path) ? -1 : REAL(name)(path, flags, rights);     \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                       \
    int name(int folder, const char *path, int flags, ...) {                 \
        va_list more;                                                        \
        va_start(more, flags);                                               \
        mode_t rights = va_arg(more, mode_t);                                \
        va_end(more);                                                        \
        return suffer(path) ? -1 : REAL(name)(folder, path, flags, rights);  \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

FILE *fopen(const char *path, const char *way) { return suffer(path) ? NULL : REAL(fopen)(path, way); }
FILE *fopen64(const char *path, const char *way) { return suffer(path) ? NULL : REAL(fopen64)(path, way); }
DIR *opendir(const char *path) { return suffer(path) ? NULL : REAL(opendir)(path); }
int stat(const char *path, struct stat *to) { return suffer(path) ? -1 : REAL(stat)(path, to); }
int stat64(const char *path, struct stat64 *to) { return suffer(path) ? -1 : REAL(stat64)(path, to); }
int lstat(const char *path, struct stat *to) { return suffer(path) ? -1 : REAL(lstat)(path, to); }
int lstat64(const char *path, struct stat64 *to) { return suffer(path) ? -1 : REAL(lstat64)(path, to); }
int mkdir(const char *path, mode_t rights) { return suffer(path) ? -1 : REAL(mkdir)(path, rights); }
int unlink(const char *path) { return suffer(path) ? -1 : REAL(unlink)(path); }
int rename(const char *from, const char *to) { return suffer(to) ? -1 : REAL(rename)(from, to); }
int symlink(const char *to, const char *path) { return suffer(path) ? -1 : REAL(symlink)(to, path); }
int access(const char *path, int how) { return suffer(path) ? -1 : REAL(access)(path, how); }
ssize_t readlink(const char *path, char *to, size_t size) {
    return suffer(path) ? -1 : REAL(readlink)(path, to, size);
}
int symlinkat(const char *to, int folder, const char *path) {
    return suffer(path) ? -1 : REAL(symlinkat)(to, folder, path);
}
ssize_t readlinkat(int folder, const char *path, char *to, size_t size) {
    return suffer(path) ? -1 : REAL(readlinkat)(folder, path, to, size);
}
int fstatat(int folder, const char *path, struct stat *to, int how) {
    return suffer(path) ? -1 : REAL(fstatat)(folder, path, to, how);
}
int fstatat64(int folder, const char *path, struct stat64 *to, int how) {
    return suffer(path) ? -1 : REAL(fstatat64)(folder, path, to, how);
}
