/* A file server in trouble, as LD_PRELOAD: below $UNSTEADY_FOLDER each access fails or is slow for as long as the
   file $UNSTEADY_SWITCH is there. The first letter of its text says how: s(tale file handle), i(/o error),
   d(enied), l(ate by a second); n(o links): only the creation of symbolic links fails; b(ad node NAME): only the
   test file of the health check on this node fails. With the word "checkpoints", only paths below a directory of
   this name are affected. */
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

enum { TEXT = 64 };

/* Write the text of the switch, empty if there is no switch. */
static void read_switch(char *text) {
    const char *path = getenv("UNSTEADY_SWITCH");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY) : -1;
    ssize_t length = file >= 0 ? read(file, text, TEXT - 1) : 0;
    if (file >= 0)
        close(file);
    text[length > 0 ? length : 0] = 0;
}

static int is_below(const char *path) {
    const char *folder = getenv("UNSTEADY_FOLDER");
    if (!path || !folder)
        return 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Return whether this process runs on the node whose name ends the text. */
static int is_on_node(const char *text) {
    const char *node = getenv("SLURMD_NODENAME"), *name = strrchr(text, ' ');
    return node && name && strcmp(node, name + 1) == 0;
}

static int error_of(const char *path, const char *text, int is_link) {
    if (strstr(text, "checkpoints") && !strstr(path, "/checkpoints/"))
        return 0;
    switch (text[0]) {
    case 's': return ESTALE;
    case 'i': return EIO;
    case 'd': return EACCES;
    case 'n': return is_link ? EPERM : 0;
    case 'b': return strstr(path, "/.dtslurm-health-") && is_on_node(text) ? EROFS : 0;
    default: return 0;
    }
}

/* Wait, or return -1 with errno set: the access must not happen. */
static int suffer_as(const char *path, int is_link) {
    int before = errno;
    char text[TEXT] = "";
    if (is_below(path))
        read_switch(text);
    int error = text[0] ? error_of(path, text, is_link) : 0;
    if (text[0] == 'l')
        usleep(1000000);
    errno = error ? error : before;
    return error ? -1 : 0;
}

static int suffer(const char *path) { return suffer_as(path, 0); }

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
int symlink(const char *to, const char *path) { return suffer_as(path, 1) ? -1 : REAL(symlink)(to, path); }
int access(const char *path, int how) { return suffer(path) ? -1 : REAL(access)(path, how); }
ssize_t readlink(const char *path, char *to, size_t size) {
    return suffer(path) ? -1 : REAL(readlink)(path, to, size);
}
int symlinkat(const char *to, int folder, const char *path) {
    return suffer_as(path, 1) ? -1 : REAL(symlinkat)(to, folder, path);
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
