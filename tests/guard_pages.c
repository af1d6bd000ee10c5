/*
 * Memory whose neighbours cannot be touched, see guard_pages.py. While guard_pages_on is set, every block that torch's tensors,
 * NumPy or numba ask for lies on pages of its own between pages without access, right before the next such page (GUARD_PAGES=after) or right behind the one
 * before it (GUARD_PAGES=before). Addresses are not used twice, so the use of freed memory is caught as well. What alignment
 * leaves between a block and the page after it holds a pattern that is checked when the block is freed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define PAGE 4096UL
#define ARENA (1UL << 40)
#define PATTERN 0xA5

int guard_pages_on = 0;
atomic_ulong guard_pages_blocks = 0;

static char *arena;
static size_t *sizes; /* of the block that begins on a page */
static atomic_size_t next_page = 1;
static int before;

__attribute__((constructor)) static void reserve(void) {
    const char *mode = getenv("GUARD_PAGES");
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    before = mode && !strcmp(mode, "before");
    arena = mmap(NULL, ARENA, PROT_NONE, flags, -1, 0);
    sizes = mmap(NULL, ARENA / PAGE * sizeof(size_t), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (arena == MAP_FAILED || sizes == MAP_FAILED) arena = NULL;
}

static int is_guarded(const void *block) {
    return arena && (const char *)block >= arena && (const char *)block < arena + ARENA;
}

static void *guarded(size_t size, size_t alignment) {
    size_t room = (size + alignment - 1) / alignment * alignment, pages = (room + PAGE - 1) / PAGE;
    if (!arena || !guard_pages_on || !size || alignment > PAGE) return NULL;
    size_t page = atomic_fetch_add(&next_page, pages + 1);
    if ((page + pages + 1) * PAGE > ARENA) return NULL;
    char *start = arena + page * PAGE;
    if (mprotect(start, pages * PAGE, PROT_READ | PROT_WRITE)) return NULL; /* too many mappings */
    sizes[page] = size;
    atomic_fetch_add(&guard_pages_blocks, 1);
    char *block = before ? start : start + pages * PAGE - room;
    memset(block + size, PATTERN, start + pages * PAGE - block - size);
    return block;
}

static size_t size_of(const char *block) { return sizes[(block - arena) / PAGE]; }

static void release(char *block) {
    size_t page = (block - arena) / PAGE, size = sizes[page];
    char *start = arena + page * PAGE, *end = arena + (page + (block + size - start + PAGE - 1) / PAGE) * PAGE;
    for (char *byte = block + size; byte < end; byte++)
        if (*(unsigned char *)byte != PATTERN) {
            static const char message[] = "guard_pages: a block was written beyond its end\n";
            if (write(2, message, sizeof message - 1)) abort();
        }
    madvise(start, end - start, MADV_DONTNEED);
    mprotect(start, end - start, PROT_NONE);
}

/* Not the objects of Python and of compilers: there can be 65530 mappings in a process */
static int holds_data(const void *caller) {
    Dl_info info;
    return guard_pages_on && dladdr(caller, &info) && info.dli_fname &&
           (strstr(info.dli_fname, "numpy") || strstr(info.dli_fname, "numba") || strstr(info.dli_fname, "/torch/"));
}
#define CALLER_HOLDS_DATA holds_data(__builtin_return_address(0))

void *malloc(size_t size) {
    void *block = CALLER_HOLDS_DATA ? guarded(size, 16) : NULL;
    return block ? block : __libc_malloc(size);
}

void free(void *block) {
    int error = errno;
    if (is_guarded(block)) release(block);
    else __libc_free(block);
    errno = error;
}

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return __libc_calloc(count, size);
    void *block = CALLER_HOLDS_DATA ? guarded(bytes, 16) : NULL; /* new pages are zero */
    return block ? block : __libc_calloc(count, size);
}

void *realloc(void *block, size_t size) {
    if (!is_guarded(block)) return __libc_realloc(block, size);
    void *moved = size ? guarded(size, 16) : NULL;
    if (size && !moved) moved = __libc_malloc(size);
    if (moved) memcpy(moved, block, size_of(block) < size ? size_of(block) : size);
    if (moved || !size) free(block);
    return moved;
}

void *memalign(size_t alignment, size_t size) { return __libc_memalign(alignment, size); }

void *aligned_alloc(size_t alignment, size_t size) { return __libc_memalign(alignment, size); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    /* torch's tensors ask for 64 and need that of their numbers: a block can end right at the page */
    size_t needed = alignment == 64 && size % 4 == 0 ? 4 : alignment;
    void *block = CALLER_HOLDS_DATA ? guarded(size, needed) : NULL;
    *result = block ? block : __libc_memalign(alignment, size);
    return *result || !size ? 0 : ENOMEM;
}

size_t malloc_usable_size(void *block) {
    static size_t (*real)(void *);
    if (is_guarded(block)) return size_of(block);
    if (!real) real = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return block ? real(block) : 0;
}
