print 'amp', 1
