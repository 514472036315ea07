# Whether device tests link without the emulator: of what it has they may ask for no more than
# no_emulator.cpp answers. Their objects are those of the emulator's build, as they include nothing
# that differs. cmake -DNM=nm -DOBJECTS=FILE -P check_links.cmake, where FILE sets lists of objects:
# `tests`, `emulator`, `in_emulator` and `no_emulator`.
include(${OBJECTS})

# The names that nm prints with one of those types, of a list of objects.
function(symbols out types)
  execute_process(COMMAND ${NM} --extern-only --format=posix ${ARGN} OUTPUT_VARIABLE text
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+ [${types}] ?[^\n]*" lines "${text}")
  list(TRANSFORM lines REPLACE " .*" "")
  list(REMOVE_DUPLICATES lines)
  set(${out} ${lines} PARENT_SCOPE)
endfunction()

symbols(emulated TDBR ${emulator})
list(FILTER emulated INCLUDE REGEX "8effinfer4cuda4host")
symbols(asked TDBR ${in_emulator})
list(APPEND emulated ${asked})
symbols(answered TDBR ${no_emulator})
symbols(missing U ${tests})
list(LENGTH missing count)
if(count EQUAL 0 OR NOT emulated)
  message(FATAL_ERROR "device tests: no symbols were read")
endif()
set(unanswered "")
foreach(name IN LISTS emulated)
  if(name IN_LIST missing AND NOT name IN_LIST answered)
    list(APPEND unanswered ${name})
  endif()
endforeach()
if(unanswered)
  list(JOIN unanswered "\n  " names)
  message(FATAL_ERROR "device tests ask for what on_device/no_emulator.cpp lacks:\n  ${names}")
endif()
